"""Compile the kernels of a training step in parallel while fairseq prepares the training.

Triton takes most of a second per kernel, and a step has a dozen. Compilation holds Python's global lock most
of the time, so each kernel is compiled in a child process, forked as torch's data loader forks its workers.
The children write to Triton's cache on disk, from which this process loads the result.
"""

import gc
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from surface_fusion.ops.backend import INTERPRETED
from surface_fusion.ops.linear_cross_entropy import row_stride
from surface_fusion.ops.packed_rows import PackedRows

logger = logging.getLogger(__name__)

ROWS = 64
PATIENCE = 60.0
"""Seconds after which a child process is terminated."""

Job = Callable[[], Any]


def kernel_calls(model: Any, smoothing: float, dtype: torch.dtype, device: torch.device) -> list[Job]:
    """Calls of each kernel that a step of *model* needs, on a few rows of *dtype* on *device*.

    Where the model's own parameters are does not matter.
    """
    from surface_fusion.ops.add_norm_triton import add_norm_backward, add_norm_forward, relu_backward
    from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_
    from surface_fusion.ops.packed_attention_triton import attention_backward, attention_forward

    encoder, decoder, cfg = model.encoder, model.decoder, model.decoder.cfg
    paired = cfg.surfacefusion is not None and decoder.paired
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    float32 = partial(torch.zeros, dtype=torch.float32, device=device)
    integers = partial(torch.zeros, dtype=torch.int64, device=device)
    seed = torch.zeros(4, dtype=torch.int32, device=device)[0]
    starts = torch.tensor([0, ROWS], device=device)
    rows = PackedRows(integers(ROWS), integers(ROWS), integers(ROWS), starts)
    jobs: list[Job] = []

    attentions = [encoder.layers[0].self_attn, decoder.layers[0].self_attn, decoder.layers[0].encoder_attn]
    if hasattr(decoder, "sf_attn"):
        attentions.append(decoder.sf_attn)
    for dim, dropped in {(a.q_proj.out_features // a.num_heads, a.dropout_module.p > 0) for a in attentions}:
        q, k, v, out, dq, dk, dv = zeros(7, ROWS, 1, dim).unbind()
        how = rows, rows, False, 0.5 if dropped else 0.0, seed
        saved = q, k, v, out, float32(1, ROWS)
        jobs.append(partial(attention_forward, q, k, v, *how))
        jobs.append(partial(attention_backward, out, saved, (dq, dk, dv), *how))

    for dim, hidden, dropped, before in {
        (layer.fc2.out_features, layer.fc1.out_features, layer.dropout_module.p > 0, layer.normalize_before)
        for layer in (encoder.layers[0], decoder.layers[0])
    }:
        rate = 0.5 if dropped else 0.0
        x, residual = zeros(2, ROWS, dim).unbind()
        vectors = zeros(3, dim).unbind()
        jobs.append(
            partial(add_norm_forward, x, vectors[0], residual, vectors[1], vectors[2], rate, 1e-5, seed)
        )
        stream = x if before else None  # of the residual, see PackedTransformer
        normed = x, vectors[0], float32(ROWS), float32(ROWS)
        jobs.append(partial(add_norm_backward, x, stream, normed, rate, seed))
        jobs.append(partial(relu_backward, zeros(ROWS, hidden), zeros(ROWS, hidden), 1.0))

    vocab = decoder.output_projection.out_features
    branches = 2 if paired else 1
    logits = zeros(ROWS * branches, row_stride(vocab))[:, :vocab].unflatten(0, (ROWS, branches))
    gate = None
    if paired:
        gate = float32(ROWS) if cfg.learned_gate else float32(1).expand(ROWS)
    numbers = float32(ROWS), gate, float32(1)[0], smoothing, float32(4, ROWS)
    jobs.append(partial(softmax_rows_, logits, integers(ROWS), *numbers, True))
    return jobs


def fork(jobs: list[Job], target: Any) -> list[BaseProcess]:
    """Let children compile what *jobs*, on tensors of the CPU, call; *target* is Triton's name of a GPU."""
    from triton.backends.nvidia.driver import CudaUtils
    from triton.runtime import JITFunction

    from surface_fusion.ops import add_norm_triton, linear_cross_entropy_triton, packed_attention_triton

    # A kernel's cache key depends on which keys were computed before, so all are computed here.
    for module in (packed_attention_triton, add_norm_triton, linear_cross_entropy_triton):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key
    context = multiprocessing.get_context("fork")
    children: list[BaseProcess] = []
    for job in [*jobs, CudaUtils]:
        child = context.Process(target=_compile_only, args=(job, target), daemon=True)
        child.start()
        children.append(child)
    return children


def _compile_only(job: Job, target: Any) -> None:
    """In a child: no GPU may be touched here, so all launches become compilations."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import JITFunction, driver

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C; it ends its children
    gc.disable()  # to collect what the parent has on the GPU would end this process
    run = JITFunction.run

    def compile_kernel(*args: Any, **kwargs: Any) -> None:
        compiled = run(*args, **{**kwargs, "warmup": True})
        CudaLauncher(compiled.src, compiled.metadata)  # a C compiler makes it

    JITFunction.run = compile_kernel
    driver.set_active(_Elsewhere(target))
    torch.set_num_threads(1)
    try:
        job()
    except Exception as error:  # the parent meets it again, and says more
        logger.debug(f"compiling in a child failed: {error}")
        sys.exit(1)


class _Elsewhere:
    """What Triton asks of a GPU when it only compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compilation:
    """Compiling all kernels of a training step while this process does something else.

    A failure is logged; it is raised again when the kernel is needed.

    Args:
        model: wherever it is.
        smoothing: label smoothing epsilon.
        dtype, device: of the training.
    """

    def __init__(self, model: Any, smoothing: float, dtype: torch.dtype, device: torch.device) -> None:
        self._children: list[BaseProcess] = []
        what = model, smoothing, dtype
        if device.type == "cuda":
            from triton.backends.compiler import GPUTarget

            major, minor = torch.cuda.get_device_capability(device)
            try:
                jobs = kernel_calls(*what, torch.device("cpu"))
                self._children = fork(jobs, GPUTarget("cuda", 10 * major + minor, 32))
            except Exception as error:  # where a process may have no children
                logger.debug(f"kernels are compiled one after another: {error}")
        self._thread = threading.Thread(target=self._finish, args=(*what, device), daemon=True)
        self._thread.start()

    def _finish(self, model: Any, smoothing: float, dtype: torch.dtype, device: torch.device) -> None:
        """Load into this process what the children left, and compile what they did not."""
        give_up = time.monotonic() + PATIENCE
        for child in self._children:
            child.join(max(0.0, give_up - time.monotonic()))
            if child.is_alive():
                child.kill()

        def run(job: Job) -> None:
            with torch.cuda.device(device if device.type == "cuda" else -1):
                job()

        try:
            jobs = kernel_calls(model, smoothing, dtype, device)
            # Triton's interpreter, for tests, knows one thread only.
            with ThreadPoolExecutor(1 if INTERPRETED else len(jobs)) as pool:
                list(pool.map(run, jobs))
        except Exception as error:  # Triton's are of any kind
            logger.warning(f"compiling kernels ahead failed: {error}")

    def wait(self) -> None:
        """Until it is done."""
        self._thread.join()
