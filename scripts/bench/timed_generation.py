"""Time the decoding of ``fairseq-generate``: a child process of ``decode.py``.

    python timed_generation.py SPECS.json OUT.json

SPECS.json is a list of :class:`Spec`. OUT.json has for each a list of :class:`Decoded`, one per batch size.
The time is that of ``task.inference_step`` on collated batches, as fairseq measures it, and of moving the
batches to the GPU.
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
    """What to decode and how.

    Attributes:
        data: data folder.
        checkpoint: path of the model.
        overrides: ``--model-overrides``.
        dtype: ``fp16`` or ``fp32``.
        batch_sizes: sentences per batch.
        max_len: ``--max-len-b``; ``--max-len-a`` is 1.2.
        length: number of tokens in each translation; None to let the model decide.
        first: number of sentences of the test set to decode with batch size 1.
        passes: number of passes over the test set.
        cpu: whether to use the CPU.
    """

    data: str
    checkpoint: str
    overrides: dict[str, Any]
    dtype: str
    batch_sizes: list[int]
    max_len: int
    length: int | None
    first: int
    passes: int
    cpu: bool


@dataclass(frozen=True)
class Decoded:
    """The result for one batch size.

    Attributes:
        batch_size: sentences per batch.
        seconds: time of each pass.
        sentences: number of sentences.
        tokens: number of tokens in the best hypotheses, including ``</s>``, as fairseq counts them.
        best: the best hypothesis of each sentence, in the order of the test set.
        scores: scores of the best hypotheses.
    """

    batch_size: int
    seconds: list[float]
    sentences: int
    tokens: int
    best: list[list[int]]
    scores: list[float]


def decode(spec: Spec) -> list[Decoded]:
    """Decode the test set with each batch size."""
    flags = [spec.data, "--path", spec.checkpoint, "--beam", "4", "--lenpen", "1.0", "--num-workers", "0"]
    flags += ["--model-overrides", repr(spec.overrides)]
    max_len_a, max_len_b = ("0", spec.length - 1) if spec.length else ("1.2", spec.max_len)  # without </s>
    flags += ["--max-len-a", max_len_a, "--max-len-b", str(max_len_b)]
    flags += ["--min-len", str(max_len_b)] if spec.length else []
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
    max_length = min(model.max_decoder_positions() for model in models) - 1
    if spec.length and spec.length > max_length:
        raise SystemExit(f"--length {spec.length}: the model translates at most {max_length} tokens")
    generator = task.build_generator(models, cfg.generation)
    results = []
    for batch_size in spec.batch_sizes:
        batches = collated(task, cfg, models, batch_size, spec.first if batch_size == 1 else None)
        results.append(timed(spec, batch_size, task, generator, models, batches))
    return results


def collated(task: Any, cfg: Any, models: list[Any], batch_size: int, first: int | None) -> list[Any]:
    """Return the test set, or its *first* sentences, in fairseq's batches."""
    batches = task.get_batch_iterator(
        dataset=task.dataset("test"),
        max_sentences=batch_size,
        max_positions=utils.resolve_max_positions(
            task.max_positions(), *[model.max_positions() for model in models]
        ),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
        num_workers=0,
        disable_iterator_cache=True,  # the cache ignores max_sentences
    ).next_epoch_itr(shuffle=False)
    return [batch for batch in batches if first is None or int(batch["id"][0]) < first]


def timed(
    spec: Spec, batch_size: int, task: Any, generator: Any, models: list[Any], batches: list[Any]
) -> Decoded:
    """Decode *batches* ``spec.passes`` times.

    Raises:
        SystemExit: the translations of two passes differ in fp32.
    """
    seconds: list[float] = []
    previous: dict[int, list[int]] | None = None
    tokens: dict[int, list[int]] = {}
    scores: dict[int, float] = {}
    for _ in range(spec.passes):
        outputs = []
        start = synchronised_time(spec.cpu)
        for batch in batches:
            sample = batch if spec.cpu else utils.move_to_cuda(batch)
            outputs.append((batch["id"], task.inference_step(generator, models, sample)))
        seconds.append(synchronised_time(spec.cpu) - start)
        best = {
            int(i): hypotheses[0]
            for ids, nbest_lists in outputs
            for i, hypotheses in zip(ids, nbest_lists, strict=True)
        }
        tokens = {i: hypothesis["tokens"].tolist() for i, hypothesis in best.items()}
        scores = {i: float(hypothesis["score"]) for i, hypothesis in best.items()}
        if previous is not None and previous != tokens and spec.dtype == "fp32":
            raise SystemExit(f"{spec.checkpoint}: two passes over the test set differ in fp32")
        previous = tokens
    ids = sorted(tokens)
    return Decoded(
        batch_size=batch_size,
        seconds=seconds,
        sentences=len(ids),
        tokens=sum(map(len, tokens.values())),
        best=[tokens[i] for i in ids],
        scores=[scores[i] for i in ids],
    )


def synchronised_time(cpu: bool) -> float:
    """Return the time once the GPU has finished its work."""
    if not cpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Entry point."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return
    specs, out = map(Path, sys.argv[1:])
    surface_fusion.register()  # fairseq's own checkpoints also need the repairs to load with current torch
    results = [decode(Spec(**fields)) for fields in json.loads(specs.read_text(encoding="utf-8"))]
    write_text(out, json.dumps([[asdict(decoded) for decoded in of_spec] for of_spec in results]))


if __name__ == "__main__":
    main()
