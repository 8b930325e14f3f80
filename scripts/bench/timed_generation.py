"""``fairseq-generate`` with the model loaded once and a clock: a child process of ``decode.py``.

    python timed_generation.py SPECS.json OUT.json

SPECS.json: a list of :class:`Spec`. OUT.json: for each a list of :class:`Decoded`, one for each batch size.
The clock runs over what fairseq's own counts, moving a batch to the GPU added: ``task.inference_step`` on
batches that are collated already.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import surface_fusion
from surface_fusion.io.atomic_write import write_text


@dataclass(frozen=True)
class Spec:
    """What to decode, with what."""

    data: str
    checkpoint: str
    overrides: dict[str, Any]
    """As ``--model-overrides``."""
    dtype: str
    batch_sizes: list[int]
    max_len: int
    """As ``--max-len-b``, beside 1.2 times the source."""
    length: int | None
    """So many tokens each translation has, whatever the model thinks; None: as it likes."""
    first: int
    """Sentences of the test set that are decoded one by one, where the batch size is 1."""
    passes: int
    cpu: bool


@dataclass(frozen=True)
class Decoded:
    """One batch size."""

    batch_size: int
    seconds: list[float]
    """Of each pass."""
    sentences: int
    tokens: int
    """Of the best hypotheses with their ends, as fairseq counts them."""
    best: list[list[int]]
    """The best hypothesis of each sentence, in the order of the test set."""
    scores: list[float]
    """Of these."""


def decode(spec: Spec) -> list[Decoded]:
    """Do it."""
    flags = [spec.data, "--path", spec.checkpoint, "--beam", "4", "--lenpen", "1.0", "--num-workers", "0"]
    flags += ["--model-overrides", repr(spec.overrides)]
    longest = ("0", spec.length - 1) if spec.length else ("1.2", spec.max_len)  # the end counts, too
    flags += ["--max-len-a", longest[0], "--max-len-b", str(longest[1])]
    flags += ["--min-len", str(longest[1])] if spec.length else []
    flags += ["--fp16"] if spec.dtype == "fp16" else []
    parser = options.get_generation_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, flags))
    task = tasks.setup_task(cfg.task)
    models, saved = checkpoint_utils.load_model_ensemble(
        [spec.checkpoint], arg_overrides=spec.overrides, task=task
    )
    task.load_dataset("test", task_cfg=saved.task)
    for model in models:
        if spec.dtype == "fp16":
            model.half()
        if not spec.cpu:
            model.cuda()
        model.prepare_for_inference_(cfg)
    most = min(model.max_decoder_positions() for model in models) - 1
    if spec.length and spec.length > most:
        raise SystemExit(f"--length {spec.length}: the model translates at most {most} tokens")
    generator = task.build_generator(models, cfg.generation)
    done = []
    for batch_size in spec.batch_sizes:
        batches = collated(task, cfg, models, batch_size, spec.first if batch_size == 1 else None)
        done.append(timed(spec, batch_size, task, generator, models, batches))
    return done


def collated(task: Any, cfg: Any, models: list[Any], batch_size: int, first: int | None) -> list[Any]:
    """The test set in fairseq's batches; of the *first* sentences only, unless that is None."""
    batches = task.get_batch_iterator(
        dataset=task.dataset("test"),
        max_sentences=batch_size,
        max_positions=utils.resolve_max_positions(
            task.max_positions(), *[model.max_positions() for model in models]
        ),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
        num_workers=0,
        disable_iterator_cache=True,  # or it gives the batches that it made first, whatever is asked for
    ).next_epoch_itr(shuffle=False)
    return [batch for batch in batches if first is None or int(batch["id"][0]) < first]


def timed(
    spec: Spec, batch_size: int, task: Any, generator: Any, models: list[Any], batches: list[Any]
) -> Decoded:
    """Decode *batches* ``spec.passes`` times.

    Raises:
        SystemExit: two passes gave different translations.
    """
    seconds: list[float] = []
    kept: dict[int, list[int]] | None = None
    scores: dict[int, float] = {}
    for _ in range(spec.passes):
        found = []
        start = now(spec.cpu)
        for batch in batches:
            sample = batch if spec.cpu else utils.move_to_cuda(batch)
            found.append((batch["id"], task.inference_step(generator, models, sample)))
        seconds.append(now(spec.cpu) - start)
        first = {
            int(i): hypotheses[0]
            for ids, several in found
            for i, hypotheses in zip(ids, several, strict=True)
        }
        best = {i: hypothesis["tokens"].tolist() for i, hypothesis in first.items()}
        scores = {i: float(hypothesis["score"]) for i, hypothesis in first.items()}
        if kept is not None and kept != best and spec.dtype == "fp32":
            raise SystemExit(f"{spec.checkpoint}: two passes over the test set differ in fp32")
        kept = best
    assert kept is not None
    tokens = sum(map(len, kept.values()))
    ordered = sorted(kept)
    in_order = [kept[i] for i in ordered], [scores[i] for i in ordered]
    return Decoded(batch_size, seconds, len(kept), tokens, *in_order)


def now(cpu: bool) -> float:
    """The time, when the GPU has done all its work."""
    if not cpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Entry point."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return
    specs, out = map(Path, sys.argv[1:])
    surface_fusion.register()  # fairseq's own models need it, too, to be loaded with today's torch
    results = [decode(Spec(**fields)) for fields in json.loads(specs.read_text(encoding="utf-8"))]
    write_text(out, json.dumps([[asdict(done) for done in several] for several in results]))


if __name__ == "__main__":
    main()
