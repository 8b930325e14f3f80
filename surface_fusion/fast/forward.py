"""fairseq's Transformer with surface fusion on packed rows: what a training step computes.

The same function of the same parameters as the modules' own forward (the oracle), with fewer and
larger products: q, k and v of a self-attention are one, k and v of all decoder layers' attentions to the
encoder are one, and both branches pass the output's feed-forward layer together. Rows are N x C, see
``packed.py``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from surface_fusion.encoder_fusion import LayerAttention, fused_states
from surface_fusion.fast.attention import attend, attend_self
from surface_fusion.fast.elementwise import drop, project_activate, project_add_norm
from surface_fusion.fast.flat import FlatParameters
from surface_fusion.fast.groups import layers_of, memory_projections, self_projections
from surface_fusion.fast.packed import PackedBatch, PackedRows
from surface_fusion.fast.triton_installed import use_kernels
from surface_fusion.pooling import PUBLISHED_FIRST_ID


class Encoded(NamedTuple):
    """What the decoder reads: memories of M x C by number (-1: the encoder's output), and the surface."""

    memories: dict[int, Tensor]
    surface: Tensor


class Features(NamedTuple):
    """What the output embedding projects: N x C, or N x 2 x C with the gate of the first, N or a number."""

    rows: Tensor
    gate: Tensor | float | None


class _Stream(NamedTuple):
    """What travels through a stack: N x C each.

    Attributes:
        residual: to which a sublayer's result is added.
        read: what the next sublayer reads, normed or not.
        states: the stack's input and its layers' outputs.
        kept: of them, where layers read combinations.
    """

    residual: Tensor
    read: Tensor
    states: list[Tensor]
    kept: list[Tensor]

    def after(self, residual: Tensor, read: Tensor) -> "_Stream":
        """Behind a sublayer."""
        return self._replace(residual=residual, read=read)


def _norm_before(stack: Any, i: int) -> Any:
    """The LayerNorm in front of layer *i*, or behind the last: None in a post-norm stack."""
    layers = layers_of(stack)
    if i == len(layers):
        return stack.layer_norm
    return layers[i].self_attn_layer_norm if layers[i].normalize_before else None


class PackedTransformer:
    """A model's parameters, as leaves whose gradients go into the flat buffer, and its forward.

    Args:
        model: a :class:`surface_fusion.model.SurfaceFusionModel` of which
            :func:`~surface_fusion.fast.eligibility.why_not_packed` says None.
        flat: what its parameters are views of.
    """

    def __init__(self, model: Any, flat: FlatParameters) -> None:
        self.cfg = model.decoder.cfg
        self.encoder, self.decoder = model.encoder, model.decoder
        self.flat = flat
        self.training = True
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []
        """Where the gradient of each leaf is added."""
        self._known: dict[Any, Tensor] = {}
        self._seeds: Iterator[Tensor] | None = None
        self._memory_projections = memory_projections(self.decoder)

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
        """A module that is small or rare, by its own forward."""
        parameters = {name: self._of(parameter) for name, parameter in module.named_parameters()}
        result: Tensor = functional_call(module, parameters, args)
        return result

    def _linear(self, x: Tensor, module: Any) -> Tensor:
        return F.linear(x, self._of(module.weight), None if module.bias is None else self._of(module.bias))

    def _linears(self, x: Tensor, modules: list[Any]) -> Tensor:
        """Several linear maps of the same rows, side by side in the result."""

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
        """What the next kernel drops by; one draw from torch's generator serves a whole forward."""
        return next(self._seeds) if self._seeds is not None else None

    def _drop(self, x: Tensor, module: Any) -> Tensor:
        return drop(x, self._rate(module))

    def _rate(self, module: Any) -> float:
        return module.p if self.training else 0.0

    def _end_sublayer(
        self, x: Tensor, projection: Any, residual: Tensor, norm: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after a sublayer that ends in *projection*, and what the next one reads."""
        rate = self._rate(layer.dropout_module)
        if norm is None:
            residual = residual + drop(self._linear(x, projection), rate)
            return residual, residual
        affine = self._of(norm.weight), self._of(norm.bias), norm.eps
        weights = self._of(projection.weight), self._of(projection.bias)
        residual, normed = project_add_norm(x, weights, residual, affine, rate, self._seed())
        return (residual if layer.normalize_before else normed), normed

    def _hidden(self, x: Tensor, layer: Any, dropout: Any) -> Tensor:
        weights = self._of(layer.fc1.weight), self._of(layer.fc1.bias)
        return project_activate(x, *weights, layer.activation_fn, self._rate(dropout))

    def _begin(self, x: Tensor, stack: Any) -> "_Stream":
        """The stack's input, and what its first layer reads."""
        stream = _Stream(x, x, [], [])
        if stack.combination is None:
            norm = _norm_before(stack, 0)
            return stream._replace(read=x if norm is None else self._norm(x, norm), states=[x])
        return self._combined(stream, stack)

    def _feed_forward(self, stream: "_Stream", stack: Any, i: int) -> "_Stream":
        """The last sublayer of layer *i*, and what the next one or the decoder reads."""
        layer = stack.layers[i]
        norm = layer.final_layer_norm
        if layer.normalize_before:
            norm = None if stack.combination is not None else _norm_before(stack, i + 1)
        x = self._hidden(stream.read, layer, layer.activation_dropout_module)
        residual, read = self._end_sublayer(x, layer.fc2, stream.residual, norm, layer)
        stream = stream._replace(residual=residual, read=read)
        if stack.combination is not None:
            return self._combined(stream, stack)
        return stream._replace(states=[*stream.states, residual])

    def _combined(self, stream: "_Stream", stack: Any) -> "_Stream":
        """After ``encoder_fusion/stack.py``: a layer reads what is made of all outputs before it."""
        kept, depth = list(stream.kept), len(stream.kept)
        x = self._call(stack.combination, stream.residual, kept)
        norm = _norm_before(stack, depth)
        last = depth == len(stack.layers)
        states = [*stream.states, x if last else stream.residual]
        return _Stream(x, x if norm is None else self._norm(x, norm), states, kept)

    def _self_attention(self, x: Tensor, layer: Any, rows: PackedRows, causal: bool) -> Tensor:
        attention = layer.self_attn
        qkv = self._linears(x, self_projections(layer)).view(len(x), 3, attention.num_heads, -1)
        rate = self._rate(attention.dropout_module)
        return attend_self(qkv, rows, causal=causal, rate=rate, seed=self._seed()).flatten(1)

    # Encoder

    def _embed(self, stack: Any, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """The scaled embeddings, and what the first layer reads but for dropout: N x C each."""
        weight = self._of(stack.embed_tokens.weight)
        embed = stack.embed_scale * F.embedding(rows.tokens, weight, stack.padding_idx)
        x = embed
        if getattr(stack, "project_in_dim", None) is not None:
            x = self._linear(x, stack.project_in_dim)
        if stack.embed_positions is not None:
            if hasattr(stack.embed_positions, "weights"):
                # Kept: the module may replace its table by a longer one while graphs read this one.
                table = self._known.setdefault(id(stack), stack.embed_positions.weights)
            else:
                table = self._of(stack.embed_positions.weight)
            # Only rows that a capacity leaves over can lie behind the table.
            places = (rows.positions + (stack.padding_idx + 1)).clamp(max=len(table) - 1)
            x = x + F.embedding(places, table)
        if stack.layernorm_embedding is not None:
            x = self._norm(x, stack.layernorm_embedding)
        return embed, x

    def encode(self, rows: PackedRows) -> Encoded:
        """Run the encoder on the source."""
        stack = self.encoder
        embed, x = self._embed(stack, rows)
        surface = embed if self.cfg.surfacefusion and self.cfg.sf_no_posedemb else x
        if self.cfg.surfacefusion in ("mean", "max"):
            surface = self._drop(self._pool(surface, rows), stack.dropout_module)
            x = self._drop(x, stack.dropout_module)
        elif surface is x:
            x = surface = self._drop(x, stack.dropout_module)
        elif self._rate(stack.dropout_module) > 0:
            mask = self._drop(torch.ones_like(x), stack.dropout_module)  # one for both
            x, surface = x * mask, surface * mask
        stream = self._begin(x, stack)
        for i, layer in enumerate(layers_of(stack)):
            x = self._self_attention(stream.read, layer, rows, causal=False)
            norm = layer.final_layer_norm if layer.normalize_before else layer.self_attn_layer_norm
            stream = stream.after(
                *self._end_sublayer(x, layer.self_attn.out_proj, stream.residual, norm, layer)
            )
            stream = self._feed_forward(stream, stack, i)
        return Encoded(self._memories(embed, stream.states, stream.read), surface)

    def _memories(self, embed: Tensor, states: list[Tensor], out: Tensor) -> dict[int, Tensor]:
        """What the decoder's layers read, from the embeddings, all states and the encoder's output."""
        fusion = getattr(self.encoder, "fusion", None)
        if fusion is None:
            return {**dict(enumerate(states[1:])), len(states) - 2: out, -1: out}
        states = fused_states(self.cfg, fusion, states, lambda: embed)
        fused = self._call(fusion, states)
        if isinstance(fusion, LayerAttention):
            mixed = fused.unflatten(-1, (-1, out.shape[-1])).unbind(-2)
            return {**dict(enumerate(mixed)), -1: out}
        norm = self.encoder.layer_norm
        return {-1: fused if norm is None else self._norm(fused, norm)}

    def _pool(self, embed: Tensor, rows: PackedRows) -> Tensor:
        """Mean or maximum over each sentence, see ``pooling.py``: slots x C."""
        published = self.cfg.sf_pool_published
        keep = torch.ones_like(rows.tokens, dtype=torch.bool)
        if published:
            keep = rows.tokens.ge(PUBLISHED_FIRST_ID)
        slots, keep = len(rows.starts) - 1, keep[:, None]
        wide = embed.to(torch.promote_types(embed.dtype, torch.float32))
        if self.cfg.surfacefusion == "mean":
            total = wide.new_zeros(slots, embed.shape[1]).index_add(0, rows.sentence, wide * keep)
            count = wide.new_zeros(slots, 1).index_add(0, rows.sentence, keep.to(wide))
            return (total / count.clamp(min=1)).to(embed.dtype)
        # Each sentence ends in </s>, an id that the published maximum leaves out, which counts it as zero.
        least = 0.0 if published else torch.finfo(embed.dtype).min
        index = rows.sentence[:, None].expand_as(embed)
        highest = embed.new_full((slots, embed.shape[1]), least)
        return highest.scatter_reduce(0, index, embed.masked_fill(~keep, least), "amax")

    # Decoder

    def decode(self, batch: PackedBatch, encoded: Encoded) -> Features:
        """Run the decoder on the target and fuse."""
        stack, rows = self.decoder, batch.tgt
        kv = {}
        for memory, projections in self._memory_projections.items():
            heads = stack.layers[0].encoder_attn.num_heads
            both = self._linears(encoded.memories[memory], projections)
            kv[memory] = iter(both.view(len(both), len(projections), heads, -1).unbind(1))
        _, x = self._embed(stack, rows)
        x = self._drop(x, stack.dropout_module)
        stream = self._begin(x, stack)
        for i, layer in enumerate(layers_of(stack)):
            before = layer.normalize_before
            x = self._self_attention(stream.read, layer, rows, causal=True)
            norm = layer.encoder_attn_layer_norm if before else layer.self_attn_layer_norm
            stream = stream.after(
                *self._end_sublayer(x, layer.self_attn.out_proj, stream.residual, norm, layer)
            )

            attention = layer.encoder_attn
            q = self._linear(stream.read, attention.q_proj).view(len(x), attention.num_heads, -1)
            k, v = (next(kv[getattr(layer, "memory_index", -1)]) for _ in range(2))
            rate = self._rate(attention.dropout_module)
            x = attend(q, k, v, rows, batch.src, rate=rate, seed=self._seed()).flatten(1)
            norm = layer.final_layer_norm if before else layer.encoder_attn_layer_norm
            stream = stream.after(*self._end_sublayer(x, attention.out_proj, stream.residual, norm, layer))
            stream = self._feed_forward(stream, stack, i)
        x = stream.read
        if stack.project_out_dim is not None:
            x = self._linear(x, stack.project_out_dim)
        if self.cfg.surfacefusion is None:
            return Features(x, None)
        return self._fuse(x, self._read_surface(stream.states, batch, encoded))

    def _read_surface(self, states: list[Tensor], batch: PackedBatch, encoded: Encoded) -> Tensor:
        if self.cfg.surfacefusion != "att":
            return encoded.surface[batch.tgt.sentence]
        query, key = states[self.decoder.query_depth], encoded.memories[-1]
        if not self.cfg.sf_no_detach:
            query, key = query.detach(), key.detach()
        attention = self.decoder.sf_attn
        q, k, v = (
            self._linear(x, module).view(len(x), attention.num_heads, -1)
            for x, module in (
                (query, attention.q_proj),
                (key, attention.k_proj),
                (encoded.surface, attention.v_proj),
            )
        )
        rate = self._rate(attention.dropout_module)
        read = attend(q, k, v, batch.tgt, batch.src, rate=rate, seed=self._seed())
        r = self._linear(read.flatten(1), attention.out_proj)
        return r if self.decoder.project_out_dim is None else self._linear(r, self.decoder.project_out_dim)

    def _fuse(self, h: Tensor, r: Tensor) -> Features:
        """As ``SurfaceFusionDecoder._head`` and ``_fuse``, on N x 2 x C."""
        cfg, decoder = self.cfg, self.decoder
        x = torch.stack([h, r], dim=1)
        if cfg.sf_ffn:
            rows = x.flatten(0, 1)
            hidden = self._hidden(rows, decoder, decoder.activation_dropout)
            out = self._drop(self._linear(hidden, decoder.fc2), decoder.dropout_module)
            x = (rows + out).view(x.shape)
        if cfg.sf_linear:
            maps = decoder.tgt_out_dim, decoder.src_out_dim
            x = torch.stack([self._linear(b, m) for b, m in zip(x.unbind(1), maps, strict=True)], dim=1)
        if not cfg.mode.gated:
            return Features(x[:, 0] + cfg.mode.scale(cfg.sf_softmax_tau) * x[:, 1], None)
        gate: Tensor | float = cfg.sf_gate
        if cfg.learned_gate:
            gate = torch.sigmoid(F.linear(x.flatten(1), self._of(decoder.meanmaxweight))).squeeze(1)
        if decoder.paired:
            return Features(x, gate)
        if isinstance(gate, Tensor):
            gate = gate[:, None]
        return Features(gate * x[:, 0] + (1 - gate) * x[:, 1], None)

    def features(self, batch: PackedBatch) -> Features:
        """The whole forward but for the output embedding."""
        self._seeds = None
        if use_kernels(self.flat.data) and self.training:
            places = 3 * len(self.encoder.layers) + 5 * len(self.decoder.layers) + 1
            draws = torch.randint(2**31 - 1, (places, 4), dtype=torch.int32, device=self.flat.data.device)
            self._seeds = iter(draws[:, 0].unbind())
        return self.decode(batch, self.encode(batch.src))

    @property
    def output_embedding(self) -> Tensor:
        """V x C."""
        return self._of(self.decoder.output_projection.weight)
