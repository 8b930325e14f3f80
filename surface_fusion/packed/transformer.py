"""Forward of fairseq's Transformer with surface fusion on packed rows, for the training step.

It computes the same function of the same parameters as the modules' forward (the reference in tests), with
fewer and larger matrix products: one for q, k and v of a self-attention, one for k and v of all decoder
layers' attentions to the encoder, and one pass of the output's feed-forward layer for both branches. Rows are
N x C, see ``batch.py``; ``layers.py`` implements single layers.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.encoder_fusion import LayerAttention
from surface_fusion.encoder_fusion.states import fused_states
from surface_fusion.modules.pooling import PUBLISHED_FIRST_ID
from surface_fusion.modules.stacks import layers_of
from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.packed_attention import attend
from surface_fusion.ops.packed_rows import PackedRows
from surface_fusion.ops.precision import at_least_float32
from surface_fusion.packed.batch import PackedBatch
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.layers import PackedLayers
from surface_fusion.packed.parameter_groups import memory_projections


class Encoded(NamedTuple):
    """The encoder's results for the decoder.

    Attributes:
        memories: what the decoder's layers attend to, M x C, by encoder layer; -1 is the encoder's output.
        surface: the source embeddings, M x C, or pooled, slots x C.
    """

    memories: dict[int, Tensor]
    surface: Tensor


class Features(NamedTuple):
    """The input of the output embedding.

    Attributes:
        rows: N x C, or N x 2 x C.
        gate: weight of the first branch of N x 2 x C: N, or a number.
    """

    rows: Tensor
    gate: Tensor | float | None


class PackedTransformer(PackedLayers):
    """The forward of a model up to its output embedding.

    Args:
        model: a :class:`surface_fusion.models.transformer_surface_fusion.SurfaceFusionModel` for which
            :func:`~surface_fusion.packed.eligibility.why_not_packed` returned None.
        flat: its flat parameters.
    """

    def __init__(self, model: Any, flat: FlatParameters) -> None:
        super().__init__(flat)
        self.cfg = model.decoder.cfg
        self.encoder, self.decoder = model.encoder, model.decoder
        self._memory_projections = memory_projections(self.decoder)

    # Encoder

    def _embed(self, stack: Any, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Return the scaled embeddings, and the first layer's input before dropout: N x C each."""
        weight = self._param(stack.embed_tokens.weight)
        embed = stack.embed_scale * F.embedding(rows.tokens, weight, stack.padding_idx)
        x = embed
        if getattr(stack, "project_in_dim", None) is not None:
            x = self._linear(x, stack.project_in_dim)
        if stack.embed_positions is not None:
            if hasattr(stack.embed_positions, "weights"):
                # Keep a reference: the module may replace its table by a longer one while graphs read it.
                table = self._cache.setdefault(id(stack), stack.embed_positions.weights)
            else:
                table = self._param(stack.embed_positions.weight)
            # Only padding rows of a capacity can exceed the table.
            indices = (rows.positions + (stack.padding_idx + 1)).clamp(max=len(table) - 1)
            x = x + F.embedding(indices, table)
        if stack.layernorm_embedding is not None:
            x = self._norm(x, stack.layernorm_embedding)
        return embed, x

    def encode(self, rows: PackedRows) -> Encoded:
        """Run the encoder on the source; also draws the dropout seeds of the following :meth:`decode`."""
        self._draw_seeds()
        stack = self.encoder
        embed, x = self._embed(stack, rows)
        surface = embed if self.cfg.surfacefusion and self.cfg.sf_no_posedemb else x
        if self.cfg.surfacefusion in ("mean", "max"):
            surface = self._dropout(self._pool(surface, rows), stack.dropout_module)
            x = self._dropout(x, stack.dropout_module)
        elif surface is x:
            x = surface = self._dropout(x, stack.dropout_module)
        elif self._rate(stack.dropout_module) > 0:
            mask = self._dropout(torch.ones_like(x), stack.dropout_module)  # one mask for both
            x, surface = x * mask, surface * mask
        state = self._stack_input(x, stack)
        for i, layer in enumerate(layers_of(stack)):
            x = self._self_attention(state.input, layer, rows, causal=False)
            norm = layer.final_layer_norm if layer.normalize_before else layer.self_attn_layer_norm
            state = state.with_result(
                *self._end_sublayer(x, layer.self_attn.out_proj, state.residual, norm, layer)
            )
            state = self._feed_forward(state, stack, i)
        return Encoded(self._memories(embed, state.states, state.input), surface)

    def _memories(self, embed: Tensor, states: list[Tensor], out: Tensor) -> dict[int, Tensor]:
        """Return what the decoder's layers attend to, by encoder layer.

        Args:
            embed: the embeddings.
            states: input and outputs of the encoder's layers.
            out: the encoder's output.
        """
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
        """Mean or maximum over each sentence, see ``modules/pooling.py``: slots x C."""
        published = self.cfg.sf_pool_published
        keep = torch.ones_like(rows.tokens, dtype=torch.bool)
        if published:
            keep = rows.tokens.ge(PUBLISHED_FIRST_ID)
        slots, keep = len(rows.starts) - 1, keep[:, None]
        wide = at_least_float32(embed)
        if self.cfg.surfacefusion == "mean":
            total = wide.new_zeros(slots, embed.shape[1]).index_add(0, rows.sentence, wide * keep)
            count = wide.new_zeros(slots, 1).index_add(0, rows.sentence, keep.to(wide))
            return (total / count.clamp(min=1)).to(embed.dtype)
        # Each sentence ends in </s>, which the published maximum excludes and counts as zero.
        least = 0.0 if published else torch.finfo(embed.dtype).min
        index = rows.sentence[:, None].expand_as(embed)
        highest = embed.new_full((slots, embed.shape[1]), least)
        return highest.scatter_reduce(0, index, embed.masked_fill(~keep, least), "amax")

    # Decoder

    def decode(self, batch: PackedBatch, encoded: Encoded) -> Features:
        """Run the decoder on the target, and surface fusion."""
        stack, rows = self.decoder, batch.tgt
        kv = {}
        for memory, projections in self._memory_projections.items():
            heads = stack.layers[0].encoder_attn.num_heads
            both = self._linears(encoded.memories[memory], projections)
            kv[memory] = iter(both.view(len(both), len(projections), heads, -1).unbind(1))
        _, x = self._embed(stack, rows)
        x = self._dropout(x, stack.dropout_module)
        state = self._stack_input(x, stack)
        for i, layer in enumerate(layers_of(stack)):
            before = layer.normalize_before
            x = self._self_attention(state.input, layer, rows, causal=True)
            norm = layer.encoder_attn_layer_norm if before else layer.self_attn_layer_norm
            state = state.with_result(
                *self._end_sublayer(x, layer.self_attn.out_proj, state.residual, norm, layer)
            )

            attention = layer.encoder_attn
            q = self._linear(state.input, attention.q_proj).view(len(x), attention.num_heads, -1)
            k, v = (next(kv[getattr(layer, "memory_index", -1)]) for _ in range(2))
            rate = self._rate(attention.dropout_module)
            x = attend(q, k, v, rows, batch.src, rate=rate, seed=self._seed()).flatten(1)
            norm = layer.final_layer_norm if before else layer.encoder_attn_layer_norm
            state = state.with_result(*self._end_sublayer(x, attention.out_proj, state.residual, norm, layer))
            state = self._feed_forward(state, stack, i)
        x = state.input
        if stack.project_out_dim is not None:
            x = self._linear(x, stack.project_out_dim)
        if self.cfg.surfacefusion is None:
            return Features(x, None)
        return self._fuse(x, self._read_surface(state.states, batch, encoded))

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
        attended = attend(q, k, v, batch.tgt, batch.src, rate=rate, seed=self._seed())
        r = self._linear(attended.flatten(1), attention.out_proj)
        return r if self.decoder.project_out_dim is None else self._linear(r, self.decoder.project_out_dim)

    def _fuse(self, h: Tensor, r: Tensor) -> Features:
        """Compute ``head`` and ``fuse`` of ``SurfaceFusionDecoder`` on N x 2 x C."""
        cfg, decoder = self.cfg, self.decoder
        x = torch.stack([h, r], dim=1)
        if cfg.sf_ffn:
            rows = x.flatten(0, 1)
            hidden = self._hidden(rows, decoder, decoder.activation_dropout)
            out = self._dropout(self._linear(hidden, decoder.fc2), decoder.dropout_module)
            x = (rows + out).view(x.shape)
        if cfg.sf_linear:
            maps = decoder.tgt_out_dim, decoder.src_out_dim
            x = torch.stack([self._linear(b, m) for b, m in zip(x.unbind(1), maps, strict=True)], dim=1)
        if not cfg.mode.gated:
            return Features(x[:, 0] + cfg.mode.scale(cfg.sf_softmax_tau) * x[:, 1], None)
        gate: Tensor | float = cfg.sf_gate
        if cfg.learned_gate:
            gate = torch.sigmoid(F.linear(x.flatten(1), self._param(decoder.meanmaxweight))).squeeze(1)
        if decoder.paired:
            return Features(x, gate)
        if isinstance(gate, Tensor):
            gate = gate[:, None]
        return Features(gate * x[:, 0] + (1 - gate) * x[:, 1], None)

    def _draw_seeds(self) -> None:
        """Draw the dropout seeds of all kernels at once."""
        self._seeds = None
        if use_kernels(self.flat.data) and self.training:
            count = 3 * len(self.encoder.layers) + 5 * len(self.decoder.layers) + 1
            draws = torch.randint(2**31 - 1, (count, 4), dtype=torch.int32, device=self.flat.data.device)
            self._seeds = iter(draws[:, 0].unbind())

    @property
    def output_embedding(self) -> Tensor:
        """V x C."""
        return self._param(self.decoder.output_projection.weight)
