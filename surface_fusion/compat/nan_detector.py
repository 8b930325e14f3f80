"""Let fairseq's ``NanDetector`` name the module whose output or gradient is not finite."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def hook_tensors(add_hooks: Callable[..., None], detector: Any, module: nn.Module) -> None:
    """fairseq's ``NanDetector.add_hooks``; hooks of output tensors replace torch 1's backward hooks.

    Those fail for a module that returns a dictionary, as fairseq's encoders do; torch 2's fail for the
    output of a linear map that is changed in place, as in fairseq's attention.
    """
    backward, detector.backward = detector.backward, False
    add_hooks(detector, module)
    detector.backward = backward

    def hook_outputs(module: nn.Module, inputs: Any, output: Any) -> None:
        for x in output if isinstance(output, tuple) else (output,):
            if torch.is_tensor(x) and x.requires_grad:
                x.register_hook(partial(detector.bhook_fn, module, None))

    if backward:
        detector.bhooks.append(module.register_forward_hook(hook_outputs))
