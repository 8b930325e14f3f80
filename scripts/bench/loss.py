"""Tables ``loss`` and ``memory``: output layer and label-smoothed loss alone, forward and backward.

    python scripts/bench/loss.py              fp16, 16,384 and 2,048 rows, width 512, vocabulary 35,008
    python scripts/bench/loss.py --quick      tiny, on the CPU if there is no GPU

Contenders, with z and s the logits of the two branches and lsm the log-softmax in float32:

* ``fairseq``: one projection, ``lsm(z)``. It has no fusion: the measurement is the same for each mode.
* ``plain``: two projections and ``g lsm(z) + (1-g) lsm(s)`` (hard) or ``lsm(z + lsm(s))`` (soft), as in the
  published code.
* ``fast``: ``surface_fusion.ops.linear_cross_entropy``, of pairs of features (hard) or their sums (soft).
* ``floor``: only the matrix products, three for each projection (two projections in hard mode).

Except for the floor, the loss is fairseq's ``label_smoothed_nll_loss`` or equal to it. The incoming gradient
is 128, a loss scale. The time is the median of 20 in milliseconds. On a GPU, a CUDA graph is replayed, so
that no contender waits for the host. ``memory`` (GPU only) is the peak of allocated memory, minus the memory
allocated before (features, output matrix, targets) and minus the gradients of features and output matrix.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from results import Run, add_common_flags, normalise_common_flags, positive
from torch import Tensor

from surface_fusion.ops.distributions import log_softmax
from surface_fusion.ops.linear_cross_entropy import linear_cross_entropy

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MODES = ("hard", "soft")
SMOOTHING, GATE, LOSS_SCALE = 0.1, 0.8, 128.0


class Problem(NamedTuple):
    """Inputs of the loss; all but the targets require gradients."""

    h: Tensor
    """N x C, features of the target branch."""
    r: Tensor
    """N x C, features of the surface branch."""
    pair: Tensor
    """N x 2 x C: h and r, the output of our decoder in hard mode."""
    weight: Tensor
    """V x C, the output matrix."""
    target: Tensor
    """N target ids."""


def make_problem(rows: int, width: int, vocab: int, dtype: torch.dtype, device: str) -> Problem:
    """Draw random inputs scaled as in a Transformer: the logits have standard deviation 1."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    weight = normal(vocab, width) * width**-0.5
    target = torch.randint(vocab, (rows,), device=device, generator=generator)
    h, r = normal(rows, width), normal(rows, width)
    pair = torch.stack([h, r], dim=1)
    for x in (h, r, pair, weight):
        x.requires_grad_()
    return Problem(h, r, pair, weight, target)


def smoothed(log_probs: Tensor, target: Tensor) -> Tensor:
    """Compute fairseq's label-smoothed loss."""
    loss: Tensor = label_smoothed_nll_loss(log_probs, target, SMOOTHING)[0]
    return loss


def fairseq_loss(p: Problem, mode: str) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the tensors that it is differentiated by."""
    return smoothed(log_softmax(F.linear(p.h, p.weight)), p.target), [p.h, p.weight]


def plain_loss(p: Problem, mode: str) -> tuple[Tensor, list[Tensor]]:
    """As :func:`fairseq_loss`."""
    z, s = F.linear(p.h, p.weight), F.linear(p.r, p.weight)
    if mode == "hard":
        fused = GATE * log_softmax(z) + (1 - GATE) * log_softmax(s)
    else:
        fused = log_softmax(z + log_softmax(s))
    return smoothed(fused, p.target), [p.h, p.r, p.weight]


def fast_loss(p: Problem, mode: str) -> tuple[Tensor, list[Tensor]]:
    """As :func:`fairseq_loss`."""
    features, gate = (p.pair, GATE) if mode == "hard" else (p.h, None)
    weights = torch.ones(len(p.target), device=p.h.device)
    losses = linear_cross_entropy(features, p.weight, p.target, weights, smoothing=SMOOTHING, gate=gate)
    return losses.loss, [features, p.weight]


LOSSES = {"fairseq": fairseq_loss, "plain": plain_loss, "fast": fast_loss}


def step_of(contender: str, p: Problem, mode: str) -> Callable[[], object]:
    """Return a function that runs forward and backward, or the matrix products for ``floor``."""
    if contender == "floor":
        x = (p.pair.flatten(0, 1) if mode == "hard" else p.h).detach()
        weight = p.weight.detach()
        gradient = F.linear(x, weight)
        return lambda: (torch.mm(x, weight.t(), out=gradient), gradient @ weight, gradient.t() @ x)

    def step() -> tuple[Tensor, ...]:
        loss, inputs = LOSSES[contender](p, mode)
        return torch.autograd.grad(loss, inputs, torch.full_like(loss, LOSS_SCALE))

    return step


def milliseconds(step: Callable[[], object], warm_up: int, repeat: int, cuda: bool) -> float:
    """Return the median time of *step*; on a GPU, of the replay of its CUDA graph."""
    for _ in range(warm_up):
        step()
    if cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
        step()
    times = []
    for _ in range(repeat):
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            start_time = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start_time))
    return statistics.median(times)


def peak_gib(step: Callable[[], object], p: Problem) -> float:
    """Return the peak of memory that *step* allocates, without the gradients (see the module's docstring)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = step()
    assert isinstance(gradients, tuple)
    gradient_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return (torch.cuda.max_memory_allocated() - before - gradient_bytes) / 2**30


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, nargs="+", metavar="N", help="default: 16384 2048")
    parser.add_argument("--width", type=positive, metavar="C", help="default: 512")
    parser.add_argument("--vocab", type=positive, metavar="V", help="default: 35008")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeat", type=positive, metavar="N", help="default: 20")
    add_common_flags(parser, "loss")
    args = parser.parse_args()
    normalise_common_flags(args, "loss")
    repeat = args.repeat or (3 if args.quick else 20)
    width, vocab = args.width or (16 if args.quick else 512), args.vocab or (200 if args.quick else 35008)

    run = Run("loss", args.out, args.cpu)
    sizes = args.rows or ([100] if args.quick else [16384, 2048])
    for rows, dtype in ((rows, dtype) for rows in sizes for dtype in args.dtype):
        p = make_problem(rows, width, vocab, DTYPES[dtype], "cpu" if args.cpu else "cuda")
        for mode in args.mode:
            setting = {"rows": rows, "width": width, "vocab": vocab, "dtype": dtype, "mode": mode}
            for contender in [*args.contender, "floor"]:
                step = step_of(contender, p, mode)
                value = milliseconds(step, 1 if args.quick else 5, repeat, not args.cpu)
                run.add("loss", contender, setting, value, "ms", repeat)
                if not args.cpu and contender != "floor":
                    run.add("memory", contender, {"part": "loss", **setting}, peak_gib(step, p), "GiB")
                del step
    run.print_table()


if __name__ == "__main__":
    main()
