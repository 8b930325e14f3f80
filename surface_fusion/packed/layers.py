"""The layers of a Transformer on packed rows: parameters as autograd leaves, and sublayers.

Rows are N x C, see ``batch.py``. The end of a sublayer (residual, dropout, LayerNorm) is one operation, so a
sublayer returns the input of the next one; see ``ops/add_norm.py``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from surface_fusion.modules.stacks import layers_of
from surface_fusion.ops.activation import project_activate
from surface_fusion.ops.add_norm import project_add_norm
from surface_fusion.ops.dropout import dropout
from surface_fusion.ops.packed_attention import attend_self
from surface_fusion.ops.packed_rows import PackedRows
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.parameter_groups import self_projections


class Stream(NamedTuple):
    """The state that layers of a stack pass on, N x C each.

    Attributes:
        residual: the residual stream, to which a sublayer's result is added.
        read: the input of the next sublayer, normalised or not.
        states: the stack's input and its layers' outputs.
        kept: of them, where layers read combinations.
    """

    residual: Tensor
    read: Tensor
    states: list[Tensor]
    kept: list[Tensor]

    def after(self, residual: Tensor, read: Tensor) -> "Stream":
        """Behind a sublayer."""
        return self._replace(residual=residual, read=read)


def norm_before(stack: Any, i: int) -> Any:
    """The LayerNorm in front of layer *i*, or behind the last: None in a post-norm stack."""
    layers = layers_of(stack)
    if i == len(layers):
        return stack.layer_norm
    return layers[i].self_attn_layer_norm if layers[i].normalize_before else None


class PackedLayers:
    """The parameters of a model, as leaves whose gradients go into the flat buffer, and its sublayers.

    Args:
        flat: what the parameters are views of.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat
        self.training = True
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []
        """The views of the flat gradient to which the gradient of each leaf is added."""
        self._known: dict[Any, Tensor] = {}
        self._seeds: Iterator[Tensor] | None = None

    # Parameters

    def _leaf(self, key: Any, data: Tensor, gradient: Tensor) -> Tensor:
        if key not in self._known:
            leaf = data.detach().requires_grad_()
            self.leaves.append(leaf)
            self.gradients.append(gradient)
            self._known[key] = leaf
        return self._known[key]

    def _of(self, parameter: nn.Parameter) -> Tensor:
        if not parameter.requires_grad:
            return parameter.detach()
        return self._leaf(id(parameter), parameter, self.flat.view(parameter, self.flat.grad))

    def _call(self, module: nn.Module, *args: Any) -> Tensor:
        """Apply a small or rare module by its own forward."""
        parameters = {name: self._of(parameter) for name, parameter in module.named_parameters()}
        result: Tensor = functional_call(module, parameters, args)
        return result

    def _linear(self, x: Tensor, module: Any) -> Tensor:
        return F.linear(x, self._of(module.weight), None if module.bias is None else self._of(module.bias))

    def _linears(self, x: Tensor, modules: list[Any]) -> Tensor:
        """Apply several linear maps to the same rows and concatenate the results."""

        def together(parameters: list[Any]) -> Tensor:
            name = parameters[0].flat_group[0]
            return self._leaf(name, *self.flat.group_view(name))

        return F.linear(x, together([m.weight for m in modules]), together([m.bias for m in modules]))

    def _norm(self, x: Tensor, module: Any) -> Tensor:
        return F.layer_norm(
            x, module.normalized_shape, self._of(module.weight), self._of(module.bias), module.eps
        )

    # Sublayers

    def _seed(self) -> Tensor | None:
        """Return the dropout seed of the next kernel; a forward draws once from torch's generator."""
        return next(self._seeds) if self._seeds is not None else None

    def _drop(self, x: Tensor, module: Any) -> Tensor:
        return dropout(x, self._rate(module))

    def _rate(self, module: Any) -> float:
        return module.p if self.training else 0.0

    def _end_sublayer(
        self, x: Tensor, projection: Any, residual: Tensor, norm: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Finish a sublayer that ends in *projection*; return the residual stream and the next input."""
        rate = self._rate(layer.dropout_module)
        if norm is None:
            residual = residual + dropout(self._linear(x, projection), rate)
            return residual, residual
        affine = self._of(norm.weight), self._of(norm.bias), norm.eps
        weights = self._of(projection.weight), self._of(projection.bias)
        residual, normed = project_add_norm(x, weights, residual, affine, rate, self._seed())
        return (residual if layer.normalize_before else normed), normed

    def _hidden(self, x: Tensor, layer: Any, dropout: Any) -> Tensor:
        weights = self._of(layer.fc1.weight), self._of(layer.fc1.bias)
        return project_activate(x, *weights, layer.activation_fn, self._rate(dropout))

    def _begin(self, x: Tensor, stack: Any) -> Stream:
        """Return the state at the stack's input."""
        stream = Stream(x, x, [], [])
        if stack.combination is None:
            norm = norm_before(stack, 0)
            return stream._replace(read=x if norm is None else self._norm(x, norm), states=[x])
        return self._combined(stream, stack)

    def _feed_forward(self, stream: Stream, stack: Any, i: int) -> Stream:
        """The last sublayer of layer *i*, and what the next one or the decoder reads."""
        layer = stack.layers[i]
        norm = layer.final_layer_norm
        if layer.normalize_before:
            norm = None if stack.combination is not None else norm_before(stack, i + 1)
        x = self._hidden(stream.read, layer, layer.activation_dropout_module)
        residual, read = self._end_sublayer(x, layer.fc2, stream.residual, norm, layer)
        stream = stream._replace(residual=residual, read=read)
        if stack.combination is not None:
            return self._combined(stream, stack)
        return stream._replace(states=[*stream.states, residual])

    def _combined(self, stream: Stream, stack: Any) -> Stream:
        """Combine all outputs so far into the input of a layer, as the modules do."""
        kept, depth = list(stream.kept), len(stream.kept)
        x = self._call(stack.combination, stream.residual, kept)
        norm = norm_before(stack, depth)
        last = depth == len(stack.layers)
        states = [*stream.states, x if last else stream.residual]
        return Stream(x, x if norm is None else self._norm(x, norm), states, kept)

    def _self_attention(self, x: Tensor, layer: Any, rows: PackedRows, causal: bool) -> Tensor:
        attention = layer.self_attn
        qkv = self._linears(x, self_projections(layer)).view(len(x), 3, attention.num_heads, -1)
        rate = self._rate(attention.dropout_module)
        return attend_self(qkv, rows, causal=causal, rate=rate, seed=self._seed()).flatten(1)
