"""The layers of a Transformer on packed rows: parameters as autograd leaves, and sublayers.

Rows are N x C, see ``batch.py``. The end of a sublayer (dropout, residual, LayerNorm) is one operation, see
``ops/add_norm.py``. With pre-norm its LayerNorm is that of the next sublayer, so each sublayer returns the
input of the next one.
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


class SublayerState(NamedTuple):
    """The state between two sublayers of a stack; tensors are N x C.

    Attributes:
        residual: the residual stream, to which a sublayer's result is added.
        input: the input of the next sublayer: normalised with pre-norm, else the residual stream.
        states: the stack's input and its layers' outputs.
        combined: outputs so far that a layer combination (DLCL, dense) reads.
    """

    residual: Tensor
    input: Tensor
    states: list[Tensor]
    combined: list[Tensor]


def norm_before(stack: Any, i: int) -> Any:
    """Return the LayerNorm before layer *i*, or after the last one: None in a post-norm stack."""
    layers = layers_of(stack)
    if i == len(layers):
        return stack.layer_norm
    return layers[i].self_attn_layer_norm if layers[i].normalize_before else None


class PackedLayers:
    """The parameters of a model as autograd leaves, and its sublayers.

    Args:
        flat: the model's flat parameters.

    Attributes:
        leaves: the parameters and groups of parameters that a forward used, detached from the model.
        gradients: for each leaf, the view of the flat gradient to which its gradient is added.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat
        self.training = True
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self._cache: dict[Any, Tensor] = {}
        self._seeds: Iterator[Tensor] | None = None

    # Parameters

    def _leaf(self, key: Any, data: Tensor, gradient: Tensor) -> Tensor:
        if key not in self._cache:
            leaf = data.detach().requires_grad_()
            self.leaves.append(leaf)
            self.gradients.append(gradient)
            self._cache[key] = leaf
        return self._cache[key]

    def _param(self, parameter: nn.Parameter) -> Tensor:
        if not parameter.requires_grad:
            return parameter.detach()
        return self._leaf(id(parameter), parameter, self.flat.view(parameter, self.flat.grad))

    def _call(self, module: nn.Module, *args: Any) -> Tensor:
        """Apply a module by its own forward."""
        parameters = {name: self._param(parameter) for name, parameter in module.named_parameters()}
        result: Tensor = functional_call(module, parameters, args)
        return result

    def _affine(self, module: Any) -> tuple[Tensor, Any]:
        """Return weight and bias of *module*; the bias may be None."""
        return self._param(module.weight), None if module.bias is None else self._param(module.bias)

    def _linear(self, x: Tensor, module: Any) -> Tensor:
        """Apply a linear map; None is the identity."""
        return x if module is None else F.linear(x, *self._affine(module))

    def _linears(self, x: Tensor, modules: list[Any]) -> Tensor:
        """Apply all linear maps of a parameter group to the same rows and concatenate the results."""

        def group(parameter: Any) -> Tensor:
            name = parameter.flat_group[0]
            return self._leaf(name, *self.flat.group_view(name))

        return F.linear(x, group(modules[0].weight), group(modules[0].bias))

    def _norm(self, x: Tensor, module: Any) -> Tensor:
        """Apply a LayerNorm; None is the identity."""
        if module is None:
            return x
        return F.layer_norm(x, module.normalized_shape, *self._affine(module), module.eps)

    # Sublayers

    def _seed(self) -> Tensor | None:
        """Return the dropout seed of the next kernel; a forward draws once from torch's generator."""
        return next(self._seeds) if self._seeds is not None else None

    def _dropout(self, x: Tensor, module: Any) -> Tensor:
        return dropout(x, self._rate(module))

    def _rate(self, module: Any) -> float:
        return module.p if self.training else 0.0

    def _end_sublayer(
        self, x: Tensor, projection: Any, state: SublayerState, norm: Any, layer: Any
    ) -> SublayerState:
        """Apply *projection*, dropout, residual and LayerNorm."""
        rate = self._rate(layer.dropout_module)
        if norm is None:
            residual = state.residual + dropout(self._linear(x, projection), rate)
            return state._replace(residual=residual, input=residual)
        affine = (*self._affine(norm), norm.eps)
        projected = self._affine(projection)
        residual, normed = project_add_norm(x, projected, state.residual, affine, rate, self._seed())
        return state._replace(residual=residual if layer.normalize_before else normed, input=normed)

    def _hidden(self, x: Tensor, layer: Any, dropout: Any) -> Tensor:
        return project_activate(x, *self._affine(layer.fc1), layer.activation_fn, self._rate(dropout))

    def _stack_input(self, x: Tensor, stack: Any) -> SublayerState:
        if stack.combination is not None:
            return self._combined(SublayerState(x, x, [], []), stack)
        return SublayerState(x, self._norm(x, norm_before(stack, 0)), [x], [])

    def _feed_forward(self, state: SublayerState, stack: Any, i: int) -> SublayerState:
        """Apply the last sublayer of layer *i*; the result's input is that of the next layer."""
        layer = stack.layers[i]
        norm = layer.final_layer_norm
        if layer.normalize_before:
            norm = None if stack.combination is not None else norm_before(stack, i + 1)
        x = self._hidden(state.input, layer, layer.activation_dropout_module)
        state = self._end_sublayer(x, layer.fc2, state, norm, layer)
        if stack.combination is not None:
            return self._combined(state, stack)
        return state._replace(states=[*state.states, state.residual])

    def _combined(self, state: SublayerState, stack: Any) -> SublayerState:
        """Combine all outputs so far into the input of a layer, as the modules do."""
        combined, depth = list(state.combined), len(state.combined)
        x = self._call(stack.combination, state.residual, combined)
        last = depth == len(stack.layers)
        states = [*state.states, x if last else state.residual]
        return SublayerState(x, self._norm(x, norm_before(stack, depth)), states, combined)

    def _self_attention(self, x: Tensor, layer: Any, rows: PackedRows, causal: bool) -> Tensor:
        attention = layer.self_attn
        qkv = self._linears(x, self_projections(layer)).view(len(x), 3, attention.num_heads, -1)
        rate = self._rate(attention.dropout_module)
        return attend_self(qkv, rows, causal=causal, rate=rate, seed=self._seed()).flatten(1)
