"""``--optimizer flat_adam``: fairseq's ``adam``, computed for all parameters at once.

It computes the formula of ``ops/adam.py`` in a few kernels, without a loop over parameters. For fp16 and bf16
models it keeps an fp32 master copy of the weights, so fairseq's memory-efficient wrappers keep precision.
"""

import ast
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed.utils import get_data_parallel_group
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor, nn

from surface_fusion.config.flags import PLAIN_HELP
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.ops.adam import AdamOptions, fused_adam, plain_adam
from surface_fusion.ops.precision import accumulation_dtype
from surface_fusion.packed.flat_parameters import FlatParameters


@dataclass
class FlatAdamConfig(FairseqDataclass):
    """The flags of ``adam``, and ``--sf-plain``."""

    adam_betas: Any = field(default=(0.9, 0.999), metadata={"help": "betas for Adam optimizer"})
    adam_eps: float = field(default=1e-8, metadata={"help": "epsilon for Adam optimizer"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay"})
    sf_plain: bool = field(default=False, metadata={"help": PLAIN_HELP})
    lr: list[float] = field(default=II("optimization.lr"))


@register_optimizer("flat_adam", dataclass=FlatAdamConfig)
class FlatAdam(FairseqOptimizer):
    """Interface to fairseq's trainer and fp16 wrappers; :class:`FlatAdamUpdate` does the update.

    Unlike with ``adam``, the gradient of a parameter that a batch does not use is zero, not None: its moments
    decay and its weights are updated, as in fairseq's distributed trainings. Parameters that were frozen
    (``requires_grad_(False)``) do not change.
    """

    optimizer: "FlatAdamUpdate"

    def __init__(self, cfg: FlatAdamConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        self._optimizer = FlatAdamUpdate(params, **self.optimizer_config, plain=cfg.sf_plain)

    @property
    def flat(self) -> FlatParameters:
        """The parameters that this optimizer trains."""
        return self.optimizer.flat

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Hyperparameters of the only parameter group."""
        lr = self.cfg.lr
        return {
            "lr": lr[0] if isinstance(lr, Sequence) else lr,
            "betas": _betas(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Average the gradient over processes, unless the wrapper around *module* does."""
        if self.flat.needs_average and dist.is_initialized():
            self.flat.average_grads(get_data_parallel_group())
        else:
            super().all_reduce_grads(module)

    def multiply_grads(self, c: float | Tensor) -> None:
        """Scale the gradient by *c*, a number or a scalar tensor, at the next step."""
        self.optimizer.grad_factor = self.optimizer.grad_factor * c

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """Compute the gradient norm and, if *max_norm* is above 0, clip the gradient at the next step.

        Returns:
            The norm before clipping: a float32 scalar on the CPU, because the trainer reads it several times.
            Infinite or NaN if a gradient is.
        """
        self.flat.attach_grads()
        # The only synchronisation of an update with one process.
        norm = (self.flat.norm_on_host() * self.optimizer.grad_factor).cpu()
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            self.multiply_grads(float((max_norm / (norm + 1e-6)).clamp(max=1)))
        return norm.float()

    def step(self, closure: Any = None, scale: float | Tensor = 1.0, groups: Any = None) -> None:
        """Update the parameters with the gradient divided by *scale*."""
        self.optimizer.step(closure, scale=scale)

    def zero_grad(self) -> None:
        """Zero the gradient and forget its factor."""
        self.optimizer.zero_grad()


class FlatAdamUpdate(torch.optim.Optimizer):
    """Adam on :class:`FlatParameters`, with one parameter group.

    Its state is saved per parameter, as in torch's optimizers, so it does not depend on the layout of the
    flat tensors: ``step``, ``exp_avg``, ``exp_avg_sq`` and, for fp16 and bf16, ``master``.

    Attributes:
        grad_factor: factor of the gradient at the next step.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    disable_mem_eff_fp16_loading_hack = True

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        plain: bool = False,
    ) -> None:
        unique = list(dict.fromkeys(params))
        super().__init__(unique, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.flat = FlatParameters.of(unique)
        self.grad_factor: float | Tensor = 1.0
        self._plain = plain
        self._dtype = accumulation_dtype(self.flat.data.dtype)
        self._half = self.flat.data.dtype != self._dtype
        self._steps = 0
        self._moments: tuple[Tensor, Tensor] | None = None
        self._master: Tensor | None = None
        self._scaled_grad: Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call torch's method without the wrapper that imports torch.compile, which takes 4 s."""
        add_param_group: Any = torch.optim.Optimizer.add_param_group
        getattr(add_param_group, "__wrapped__", add_param_group)(self, param_group)

    @property
    def supports_step_with_scale(self) -> bool:
        """Whether a wrapper should pass its factor to ``step``: true for memory-efficient wrappers only.

        If it were true for fairseq's ``FP16Optimizer``, which passes fp32 copies to this class, that wrapper
        would never reset its factor under bf16.
        """
        return self._half

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradient and forget its factor; ``.grad`` is never None."""
        self.flat.zero_grad()
        self.grad_factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float | Tensor = 1.0) -> Any:  # type: ignore[override]
        """Update with the gradient times ``grad_factor`` / *scale*, without a synchronisation."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flat.attach_grads()
        self._update(self.grad_factor / scale)
        self._steps += 1
        self.grad_factor = 1.0
        return loss

    def _update(self, factor: float | Tensor) -> None:
        """Apply Adam with the gradient times *factor*."""
        data = self.flat.data
        if self._half and self._master is None:  # created here, since a checkpoint may be loaded before
            self._master = data.to(self._dtype)
        if self._half and self._scaled_grad is None:
            self._scaled_grad = torch.empty_like(data, dtype=self._dtype)
        weights = data if self._master is None else self._master
        grad = self.flat.grad if self._scaled_grad is None else self._scaled_grad
        # A vector: fp16 times a scalar would be rounded to fp16.
        vector = torch.empty(1, dtype=self._dtype, device=data.device).fill_(factor)
        torch.mul(self.flat.grad, vector, out=grad)
        group = self.param_groups[0]
        options = AdamOptions(*(group[name] for name in AdamOptions._fields))
        adam = plain_adam if self._plain else fused_adam
        moments = self._allocated_moments()
        frozen = [] if self.flat.requires_grad else [p for p in self.flat.offsets if not p.requires_grad]
        unchanged = [self.flat.view(param, flat) for param in frozen for flat in (weights, *moments)]
        before = [part.clone() for part in unchanged]
        adam(weights, grad, *moments, self._steps + 1, options)
        for part, value in zip(unchanged, before, strict=True):
            part.copy_(value)
        if self._half:
            data.copy_(weights)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the state per parameter index. Its tensors are views that later updates change."""
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        params = self.param_groups[0]["params"]
        state: dict[int, dict[str, Any]] = {}
        if self._moments is not None:
            tensors = self._named_state().items()
            for number, param in enumerate(params):
                state[number] = {name: self.flat.view(param, flat) for name, flat in tensors}
                state[number]["step"] = self._steps
        return {"state": state, "param_groups": [{**group, "params": list(range(len(params)))}]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict` of this class or of fairseq's ``adam``, which has no ``master``.

        Raises:
            SurfaceFusionError: its parameters differ from those of this optimizer.
        """
        params = self.param_groups[0]["params"]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(state_dict["param_groups"]) != 1 or len(saved) != len(params):
            raise SurfaceFusionError(
                f"the optimizer's state has {len(saved)} parameters in {len(state_dict['param_groups'])} "
                f"parameter group(s), this training has {len(params)} in one; add --reset-optimizer"
            )
        states = [state_dict["state"].get(number) for number in saved]
        for number, (param, state) in enumerate(zip(params, states, strict=True)):
            shape = None if state is None else tuple(state["exp_avg"].shape)
            if any(states) and shape != tuple(param.shape):
                raise SurfaceFusionError(
                    f"parameter {number} of the parameter group has shape {shape} in the optimizer's state, "
                    f"{tuple(param.shape)} in this training; add --reset-optimizer"
                )
        self.param_groups[0].update({**state_dict["param_groups"][0], "params": params})
        self._steps, self._moments, self._master = 0, None, None
        if not any(states):
            return
        steps = {int(state["step"]) for state in states}
        if len(steps) != 1:
            raise SurfaceFusionError(
                f"the parameter group's parameters were updated {min(steps)} to {max(steps)} times, but "
                "flat_adam updates all of them each time; add --reset-optimizer"
            )
        self._steps = steps.pop()
        self._allocated_moments()
        if self._half and all("master" in state for state in states):
            self._master = self.flat.data.to(self._dtype)
        for name, flat in self._named_state().items():
            for param, state in zip(params, states, strict=True):
                self.flat.view(param, flat).copy_(state[name])

    def _allocated_moments(self) -> tuple[Tensor, Tensor]:
        """Return the first and second moment, allocated at first use, after the model's own memory."""
        if self._moments is None:
            zeros = torch.zeros_like(self.flat.data, dtype=self._dtype)
            self._moments = zeros, zeros.clone()
        return self._moments

    def _named_state(self) -> dict[str, Tensor]:
        named = dict(zip(("exp_avg", "exp_avg_sq"), self._allocated_moments(), strict=True))
        return named if self._master is None else {**named, "master": self._master}


def _betas(value: Any) -> tuple[float, float]:
    """Parse ``--adam-betas``: a string (command line), list (YAML) or tuple (default)."""
    try:
        beta1, beta2 = map(float, ast.literal_eval(value) if isinstance(value, str) else value)
    except (TypeError, ValueError, SyntaxError):
        beta1 = beta2 = math.nan
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise SurfaceFusionError(f"--adam-betas {value!r}: give two numbers in [0, 1), as in '(0.9, 0.98)'")
    return beta1, beta2
