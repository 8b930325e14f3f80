"""Store all parameters as views of one flat tensor and all gradients as views of another.

Operations on all parameters (Adam, the gradient norm, zeroing, averaging over processes) then take one kernel
instead of one per parameter.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.packed.gradient_reduction import NORM_ROW, average_over_processes, gradient_norm

ALIGNMENT = 128
"""Bytes: vectorised loads and tensor cores need addresses that are multiples of this."""


class FlatParameters:
    """Two flat tensors and the parameters that are views of them. Create it with :meth:`of`.

    Parameters with an attribute ``flat_group = (group, rank)`` are stored contiguously, sorted by rank, at
    the position of the group's first parameter; all others start at multiples of ``ALIGNMENT``. The gaps are
    always zero in both tensors. The model's ``load_state_dict`` copies into the views; ``.to`` and ``.half``
    replace the parameters, so call them before.

    Attributes:
        data, grad: 1-D, of the parameters' dtype, on their device; never reallocated.
        offsets: offset of each parameter in elements, in the order in which they were given.
        needs_average: a step wrote the gradient, which is not averaged over processes yet
            (:meth:`average_grads`).
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        unique = list(dict.fromkeys(params))
        dtype, device = _common_dtype_and_device(unique)
        self.offsets, self._groups, end = _layout(unique, ALIGNMENT // dtype.itemsize)
        self.data = torch.zeros(_round_up(end, NORM_ROW), dtype=dtype, device=device)
        self.grad = torch.zeros_like(self.data)
        self.needs_average = False
        self._averaged = False
        self._grads_in_place = False  # known for the next zero_grad
        self._norm: tuple[Tensor, Any] | None = None  # on the host, and the event after its copy

        self._views: dict[nn.Parameter, tuple[Tensor, int]] = {}  # the gradient, the data's address
        for param in unique:
            data, grad = self.view(param), self.view(param, self.grad)
            data.copy_(param.detach())
            if param.grad is not None:
                grad.copy_(param.grad)
            param.data, param.grad = data, grad
            self._views[param] = grad, data.data_ptr()
            param.flat_reference = _WeakReference(self)  # type: ignore[attr-defined]

    @classmethod
    def of(cls, params: Iterable[nn.Parameter]) -> "FlatParameters":
        """Make *params* flat. If they are all views of one ``FlatParameters`` already, return that.

        Raises:
            SurfaceFusionError: no parameters, or not all of one dtype and on one device; members of a group
                that cannot be stacked.
        """
        unique = list(dict.fromkeys(params))
        flat = _flat_with(unique)
        return flat if flat is not None and len(flat.offsets) == len(unique) else cls(unique)

    def contains(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether all of *params* are still views of this flat tensor."""
        return all(p in self._views and self._views[p][1] == p.data_ptr() for p in params)

    @property
    def requires_grad(self) -> bool:
        """Whether all parameters do."""
        return all(map(attrgetter("requires_grad"), self.offsets))

    def version(self) -> int:
        """A number that changes with each in-place change of a parameter, except through ``.data``."""
        return self.data._version + sum(map(attrgetter("_version"), self.offsets))

    def view(self, param: nn.Parameter, flat: Tensor | None = None) -> Tensor:
        """The part of *flat* that belongs to *param*, in its shape.

        Args:
            flat: ``data`` (the default), or any tensor of the same layout.
        """
        start = self.offsets[param]
        return (self.data if flat is None else flat)[start : start + param.numel()].view(param.shape)

    def group_view(self, group: Hashable) -> tuple[Tensor, Tensor]:
        """Data and gradient of a group, its members stacked on axis 0.

        Raises:
            KeyError: no parameter carries this group.
        """
        start, shape = self._groups[group]
        part = slice(start, start + shape.numel())
        return self.data[part].view(shape), self.grad[part].view(shape)

    def attach_grads(self) -> None:
        """Restore every ``.grad`` as a view, and copy a gradient that replaced it; None counts as zero.

        Does nothing if a training step on packed rows wrote the gradient, which uses the flat tensor only.

        Raises:
            RuntimeError: a parameter is no longer a view.
        """
        if not self._gradient_is_flat_only:
            self._attach()

    @torch.no_grad()
    def _attach(self) -> None:
        for param, (grad, address) in self._views.items():
            if param.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} ({param.dtype}, {param.device}) is no view "
                    f"of the flat parameters ({self.data.dtype}, {self.data.device}) any more; move or "
                    "convert the model (.to, .half) before its optimizer is built"
                )
            if param.grad is not grad:
                if param.grad is None:
                    grad.zero_()
                else:
                    grad.copy_(param.grad)
                param.grad = grad

    @property
    def _gradient_is_flat_only(self) -> bool:
        """Whether a training step on packed rows wrote the gradient, without setting ``.grad``."""
        return self.needs_average or self._averaged

    def zero_grad(self) -> None:
        """Zero all gradients, and restore every ``.grad`` as a view.

        Raises:
            RuntimeError: a parameter is no longer a view.
        """
        first, (_, address) = next(iter(self._views.items()))
        if first.data_ptr() != address:
            self._attach()  # raises
        if not self._grads_in_place:
            for param, (grad, _) in self._views.items():
                if param.grad is not grad:
                    param.grad = grad
        self.grad.zero_()
        self.needs_average = self._averaged = self._grads_in_place = False
        self._norm = None

    def grad_norm(self) -> Tensor:
        """Euclidean norm of the gradient, a scalar on its device, in float32 (float64 for float64)."""
        return gradient_norm(self.grad)

    def launch_norm(self) -> None:
        """Launch :meth:`grad_norm` and its copy to the host; the gradient must not change afterwards.

        Also checks that every ``.grad`` is in place, for the next :meth:`zero_grad`: this takes 0.3 ms for
        260 parameters, and the GPU is busy now.
        """
        if self.grad.is_cuda:
            norm = self.grad_norm()
            on_host = torch.empty((), dtype=norm.dtype, pin_memory=True).copy_(norm, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self._norm = on_host, copied
        self._grads_in_place = all(param.grad is grad for param, (grad, _) in self._views.items())

    def norm_on_host(self) -> Tensor:
        """:meth:`grad_norm` on the CPU, from :meth:`launch_norm` if that was called."""
        if self._norm is None or not self._gradient_is_flat_only:
            return self.grad_norm().cpu()
        norm, copied = self._norm
        copied.synchronize()
        return norm

    def launch_average(self, group: dist.ProcessGroup | None) -> None:
        """Launch the average of :meth:`average_grads` before the optimizer needs it."""
        self._attach()
        average_over_processes(self.grad, group)
        self._averaged, self._norm = True, None

    def average_grads(self, group: dist.ProcessGroup | None) -> None:
        """Average the gradient over the processes of *group*, unless :meth:`launch_average` did.

        ``needs_average`` must be equal in all processes.
        """
        if not self._averaged:
            self.launch_average(group)
        self.needs_average = False


class _WeakReference:
    """A weak reference from a parameter to its flat parameters. A pickled parameter keeps an empty one."""

    def __init__(self, flat: FlatParameters | None = None) -> None:
        self.get: Callable[[], FlatParameters | None] = weakref.ref(flat) if flat else lambda: None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _WeakReference, ()


def flat_of(model: nn.Module) -> FlatParameters | None:
    """Return the FlatParameters of which all trainable parameters of *model* are views, or None."""
    return _flat_with([param for param in model.parameters() if param.requires_grad])


def _flat_with(params: list[nn.Parameter]) -> FlatParameters | None:
    """Return the FlatParameters of which all *params* are views, or None."""
    reference: _WeakReference | None = getattr(params[0], "flat_reference", None) if params else None
    flat = None if reference is None else reference.get()
    return flat if flat is not None and flat.contains(params) else None


def _common_dtype_and_device(params: list[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    kinds = Counter((param.dtype, param.device) for param in params)
    if len(kinds) != 1:
        counts = ", ".join(f"{n} of {dtype} on {device}" for (dtype, device), n in kinds.items()) or "none"
        raise SurfaceFusionError(
            f"flat parameters must be of one dtype and on one device; found {counts}; use another --optimizer"
        )
    return next(iter(kinds))


def _layout(
    params: list[nn.Parameter], alignment: int
) -> tuple[dict[nn.Parameter, int], dict[Hashable, tuple[int, torch.Size]], int]:
    """The offset of each parameter, the offset and stacked shape of each group, and the end, in elements."""
    blocks: dict[tuple[bool, Hashable], list[nn.Parameter]] = {}
    for param in params:
        group = getattr(param, "flat_group", None)
        key = (False, id(param)) if group is None else (True, group[0])
        blocks.setdefault(key, []).append(param)
    offsets = dict.fromkeys(params, 0)  # in the given order
    groups: dict[Hashable, tuple[int, torch.Size]] = {}
    end = 0
    for (grouped, group), block in blocks.items():
        end = start = _round_up(end, alignment)
        if grouped:
            block.sort(key=attrgetter("flat_group"))  # by rank
            groups[group] = start, _stacked_shape(group, block)
        for param in block:
            offsets[param] = end
            end += param.numel()
    return offsets, groups, end


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _stacked_shape(group: Hashable, members: list[nn.Parameter]) -> torch.Size:
    shapes = [tuple(param.shape) for param in members]
    if len({shape[1:] for shape in shapes}) != 1 or not shapes[0]:
        raise SurfaceFusionError(f"group {group!r} of flat parameters cannot be stacked: shapes {shapes}")
    return torch.Size([sum(shape[0] for shape in shapes), *shapes[0][1:]])
