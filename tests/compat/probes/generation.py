"""Faults in search, the hub and interactive translation."""

import argparse
import tempfile
from typing import Any

import torch
from fairseq import metrics, search, sequence_generator, utils
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from fairseq_cli import interactive
from omegaconf import OmegaConf
from torch import Tensor

from tests.compat.probes.expect import fails, replaced


def diverse_beam_fails() -> bool:
    step = search.DiverseBeamSearch(Dictionary(), num_groups=2, diversity_strength=0.5)
    lprobs = torch.rand(2, 2, 9).log_softmax(-1)
    ids = torch.tensor([70, 90])
    step.step(0, lprobs, None, None, ids)
    return fails(step.step, 1, lprobs, torch.zeros(2, 2, 1), None, ids, error=IndexError)


def ngrams_are_repeated() -> bool:
    tokens, lprobs = [2, 5, 6, 5], torch.zeros(1, 9)
    NGramRepeatBlock(2)(torch.tensor([[*tokens, 1, 1, 1]]), lprobs, bsz=1, beam_size=1, step=3)
    return bool(lprobs[0, 6] == 0)


def replace_unk_needs_file() -> bool:
    return fails(utils.load_align_dict, "@@ ", error=FileNotFoundError)


def replace_unk_fails() -> bool:
    words = Dictionary()
    hypothesis = torch.tensor([words.unk()])
    return fails(utils.post_process_prediction, hypothesis, "bird", [(0, 0)], {}, words, error=TypeError)


def replace_unk_has_no_alignment() -> bool:
    task = TranslationTask(argparse.Namespace(), Dictionary(), Dictionary())
    with replaced(sequence_generator, "SequenceGenerator", lambda *args, **kwargs: "without alignment"):
        generator = task.build_generator([], argparse.Namespace(replace_unk="", print_alignment=None))
    return bool(generator == "without alignment")


def generate_takes_constraints() -> bool:
    constrained = search.LexicallyConstrainedBeamSearch(Dictionary(), "ordered")
    return fails(constrained.init_constraints, None, 1, error=TypeError)


def empty_hypotheses_have_no_bleu() -> bool:
    task = TranslationTask(argparse.Namespace(eval_bleu=True), Dictionary(), Dictionary())
    criterion = type("Criterion", (), {"reduce_metrics": staticmethod(lambda logging_outputs: None)})()
    output = {"_bleu_sys_len": 0, "_bleu_ref_len": 5, "ntokens": 5, "nsentences": 1}
    output |= {f"_bleu_{name}_{i}": 0 for name in ("counts", "totals") for i in range(4)}
    with metrics.aggregate(new_root=True) as values:
        task.reduce_metrics([output], criterion)
    return "bleu" not in values.get_smoothed_values()


def _task(words: Dictionary) -> Any:
    task: Any = FairseqTask(argparse.Namespace())
    task.build_dataset_for_inference = lambda rows, sizes, **kwargs: LanguagePairDataset(rows, sizes, words)
    return task


def _rows(words: Dictionary, lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.full((length,), words.eos()) for length in lengths]


class _Hub:
    """fairseq's hub, whose translation of a line is the line's length."""

    def __init__(self, max_tokens: int) -> None:
        self.words, self.device, self.models, self.max_positions = Dictionary(), "cpu", [], 10
        self.cfg = OmegaConf.create(
            {"generation": {}, "dataset": {"max_tokens": max_tokens, "batch_size": None}}
        )
        self.task = _task(self.words)
        self.task.build_generator = lambda *args, **kwargs: None
        self.task.inference_step = lambda generator, models, batch: batch["net_input"]["src_lengths"].tolist()

    def _build_batches(self, *args: Any) -> Any:
        return GeneratorHubInterface._build_batches(self, *args)

    def lengths(self, *lengths: int) -> list[int]:
        return GeneratorHubInterface.generate(self, _rows(self.words, lengths), skip_invalid_size_inputs=True)


def hub_drops_long_line() -> bool:
    return _Hub(max_tokens=100).lengths(3, 50, 4) == [3, 4]


def hub_is_limited_by_training() -> bool:
    return fails(_Hub(max_tokens=5).lengths, 3, 8)


def carriage_return_ends_typed_line() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"a \r b\nc\n")
        file.flush()
        return len(list(interactive.buffered_read(file.name, 1))) == 3


def interactive_fails_on_long_line() -> bool:
    words = Dictionary()
    task, rows = _task(words), _rows(words, (3, 50, 4))
    task.get_interactive_tokens_and_lengths = lambda *args: (rows, [len(row) for row in rows])
    dataset = {"max_tokens": 100, "batch_size": None, "skip_invalid_size_inputs_valid_test": False}
    cfg = OmegaConf.create({"generation": {"constraints": None}, "dataset": dataset})
    return fails(lambda: list(interactive.make_batches(["a", "b", "c"], cfg, task, 10, str)))
