"""Run in a process of its own, with ``plain`` or ``plugin``: what TorchScript makes of fairseq's own parts.

Prints one JSON object: a name of what was scripted or traced -> the numbers that it gives.
"""

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq import options, search, tasks
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

SIZES = ("--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "16")
HEADS = ("--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--share-all-embeddings")


class Logits(nn.Module):
    """A model's first output, which is all that a trace can return."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor) -> Tensor:
        return self.model(src_tokens, src_lengths, prev_output_tokens)[0]


def model_and_task() -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for language in ("en", "ro"):
            words = (f"w{i} {64 - i}\n" for i in range(4, 64))
            Path(folder, f"dict.{language}.txt").write_text("".join(words))
        flags = [folder, "-s", "en", "-t", "ro", "--cpu", "-a", "transformer", *SIZES, *HEADS]
        args: Namespace = options.parse_args_and_arch(options.get_training_parser(), flags)
        task = tasks.setup_task(args)
    torch.manual_seed(1)
    return task.build_model(args).eval(), task


def hypotheses(generator: Any, net_input: dict[str, Tensor]) -> list[Any]:
    found = generator.forward({"net_input": net_input})
    return [[[h["tokens"].tolist(), h["positional_scores"].tolist()] for h in several] for several in found]


def results() -> dict[str, Any]:
    model, task = model_and_task()
    words = task.target_dictionary
    generator = torch.Generator().manual_seed(2)
    src = torch.randint(4, 60, (2, 5), generator=generator)
    net = {"src_tokens": src, "src_lengths": torch.tensor([5, 5])}
    inputs = (*net.values(), src[:, :4])
    found: dict[str, Any] = {}
    with torch.no_grad():
        model(*inputs)  # the decoder keeps its causal mask
        found["model"] = torch.jit.script(model)(*inputs)[0].tolist()
        found["trace"] = torch.jit.trace(Logits(model), inputs)(*inputs).tolist()
        for name, kwargs in {
            "generator": {},
            "ngrams": {"no_repeat_ngram_size": 2},
            "diverse": {"search_strategy": search.DiverseBeamSearch(words, 2, 0.5), "beam_size": 4},
        }.items():
            each = SequenceGenerator([model], words, **{"beam_size": 2, "max_len_b": 8, **kwargs})
            found[name] = hypotheses(torch.jit.script(each), net)
        blocked = torch.jit.script(NGramRepeatBlock(2))(src, torch.zeros(2, 64), 2, 1, 4)
        found["block"] = blocked.isinf().sum().tolist()
    return found


def main() -> None:
    """See above."""
    if sys.argv[1] == "plugin":
        import surface_fusion  # noqa: F401
    assert ("surface_fusion" in sys.modules) == (sys.argv[1] == "plugin")
    print(json.dumps(results()))
