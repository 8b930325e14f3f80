"""Repair options of beam search, and refuse those that a command cannot use."""

import argparse
import copy
from typing import Any

from fairseq.data.data_utils import post_process

from surface_fusion.compat.patching import Original, arguments, repair
from surface_fusion.errors import SurfaceFusionError


@repair("fairseq.search.DiverseBeamSearch.step", probe="diverse_beam_fails")
def map_sentence_ids(step_groups: Original, *args: Any, **kwargs: Any) -> Any:
    """Map ids of sentences to rows for ``--diverse-beam-groups``; fairseq fails once one is finished."""
    given = arguments(step_groups, *args, **kwargs)
    search, ids = given["self"], given["original_batch_idxs"]
    if ids is not None:
        if given["step"] == 0:
            search.batch_ids = ids
        given["original_batch_idxs"] = ids[:, None].eq(search.batch_ids[None, :]).int().argmax(dim=1)
    return step_groups(**given)


@repair(
    "fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram",
    probe="ngrams_are_repeated",
    report="fs 5206",
)
def block_written_ngrams(
    block: Original, module: Any, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int
) -> Any:
    """Search the columns up to the current step alone for n-grams of ``--no-repeat-ngram-size``."""
    return block(module, tokens[:, : step + 1], lprobs, bsz, beam_size, step)


@repair("fairseq.utils.load_align_dict", probe="replace_unk_needs_file")
def accept_replace_unk_alone(load_align_dict: Original, replace_unk: str | None) -> Any:
    """Read the default ``"@@ "`` of ``--replace-unk`` as no dictionary; fairseq opens it as a file."""
    return load_align_dict("" if replace_unk == "@@ " else replace_unk)


class SourceAlignment(list[Any]):
    """An alignment as fairseq's generators return it, with the tokens of the source text."""

    def __init__(self, alignment: Any, source: str) -> None:
        super().__init__(alignment)
        self.source = source.split()


@repair("fairseq.tasks.fairseq_task.FairseqTask.build_generator", probe="replace_unk_has_no_alignment")
def align_for_replacement(
    build_generator: Original, task: Any, models: Any, args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Make the alignment that ``--replace-unk`` needs, and refuse the options of iterative models."""
    for name in ("print_step", "retain_iter_history"):
        if getattr(args, name, False):
            raise SurfaceFusionError(f"--{name.replace('_', '-')} needs an iterative model; leave it out")
    if getattr(args, "replace_unk", None) is not None and not getattr(args, "print_alignment", None):
        args = copy.copy(args)
        args.print_alignment = "hard"
        for module in (module for model in models for module in model.modules()):
            if hasattr(module, "need_attn"):  # cleared by prepare_for_inference_ without --print-alignment
                module.need_attn = True
    return build_generator(task, models, args, *rest, **kwargs)


@repair("fairseq_cli.generate.main", probe="generate_takes_constraints")
def refuse_options_of_interactive(main: Original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse ``--constraints`` in ``generate``, and ``--replace-unk`` without the source text; both fail."""
    flat = isinstance(cfg, argparse.Namespace)
    generation, task = (cfg, cfg) if flat else (cfg.generation, cfg.task)
    if generation.constraints:
        raise SurfaceFusionError("--constraints works in interactive only, which reads them after the source")
    if generation.replace_unk is not None and "raw" not in str(getattr(task, "dataset_impl", "raw")):
        raise SurfaceFusionError(
            "--replace-unk copies words of the source text, which binarised data lacks; use interactive, or "
            "give text files with --dataset-impl raw"
        )
    return main(cfg, *args, **kwargs)


@repair("fairseq.utils.post_process_prediction", probe="replace_unk_fails")
def replace_unknown_words(process: Original, *args: Any, **kwargs: Any) -> Any:
    """Replace ``<unk>`` by the source word with the most attention for ``--replace-unk``; fairseq fails.

    Words are looked up before subwords are joined: the alignment counts subwords.
    """
    given = arguments(process, *args, **kwargs)
    alignment, align_dict, words = given["alignment"], given["align_dict"], given["tgt_dict"]
    if align_dict is None:
        return process(*args, **kwargs)
    source = getattr(alignment, "source", given["src_str"].split())
    ignored = given["extra_symbols_to_ignore"]
    pieces = words.string(given["hypo_tokens"], extra_symbols_to_ignore=ignored)
    known = copy_source_words(pieces, words.unk_string(), source, alignment, align_dict)
    text = post_process(known, given["remove_bpe"])
    return words.encode_line(text, add_if_not_exist=True), text, alignment


def copy_source_words(
    text: str, unk: str, source: list[str], alignment: Any, align_dict: dict[str, str]
) -> str:
    """Replace each *unk* in *text* by the aligned token of *source*, or by its entry in *align_dict*."""
    positions = _source_positions(alignment, len(source))
    words = text.split()
    for i, word in enumerate(words):
        if word == unk and positions.get(i, len(source)) < len(source):
            original = _whole_word(source, positions[i])
            words[i] = align_dict.get(original, original)
    return " ".join(words)


def _source_positions(alignment: Any, length: int) -> dict[int, int]:
    """Source position by target position, of a hard alignment (pairs) or a soft one (rows of weights).

    The rows also have the weight of ``</s>``, after those of the *length* tokens.
    """
    rows = list(alignment)
    if rows and isinstance(rows[0], tuple):
        return {target: source for source, target in rows}
    weights = ([float(weight) for weight in row[:length]] for row in rows)
    return {i: row.index(max(row)) for i, row in enumerate(weights) if row}


def _whole_word(pieces: list[str], i: int) -> str:
    """The word of which ``pieces[i]`` is a part, if the parts end in ``@@``."""
    first, last = i, i
    while first > 0 and pieces[first - 1].endswith("@@"):
        first -= 1
    while last + 1 < len(pieces) and pieces[last].endswith("@@"):
        last += 1
    return "".join(piece.removesuffix("@@") for piece in pieces[first : last + 1])
