"""One decoding step for all hypotheses, on caches that are not reordered.

The B hypotheses (lanes) of a sentence share one pool of keys and values; position t holds the keys that each
of the B lanes wrote in step t. When beam search continues hypothesis j in lane k, no key moves. Only the
*ancestry* of lane k is replaced by that of j: it stores which lane wrote position t of the prefix. Attention
reads the whole pool and masks what is not in a lane's ancestry. So no layer's cache needs reordering, and a
sentence's keys, like those of its source, are read once for all its hypotheses.

All shapes are those of the cache, S sentences x B lanes = R rows, and a step does not synchronise, so it can
be captured in a CUDA graph.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from surface_fusion.modules.stacks import layers_of
from surface_fusion.ops.backend import use_kernels

NARROW_HEAD = 128
"""Head widths that the Triton kernel supports; torch handles wider ones, as the surface's single head."""


class StepOut(NamedTuple):
    """Features R x 1 x C (or R x 1 x 2 x C), and attention to the source R x 1 x source if wanted."""

    features: Tensor
    attention: Tensor | None


class FusedWeights:
    """The projections that are done as one: q, k, v of a layer; k, v of all layers' source attentions.

    Copies: call :meth:`refresh` before use, since training changes parameters unnoticed.
    """

    @torch.inference_mode(False)  # else only usable in inference mode from then on
    def __init__(self, decoder: Any) -> None:
        self.layers = layers_of(decoder)
        weight = self.layers[0].encoder_attn.k_proj.weight
        count, (dim, source_dim) = len(self.layers), weight.shape
        self.qkv_weight = weight.new_empty(count, 3, dim, dim)
        self.qkv_bias = weight.new_empty(count, 3, dim)
        self.qkv = list(zip(self.qkv_weight.flatten(1, 2), self.qkv_bias.flatten(1, 2), strict=True))
        """3C x C and 3C of each layer."""
        self.source_weight = weight.new_empty(count, 2, dim, source_dim)
        self.source_bias = weight.new_empty(count, 2, dim)

    def refresh(self) -> None:
        """Copy the parameters as they are now."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            own, source = layer.self_attn, layer.encoder_attn
            for j, proj in enumerate((own.q_proj, own.k_proj, own.v_proj)):
                targets += (self.qkv_weight[i, j], self.qkv_bias[i, j])
                sources += (proj.weight, proj.bias)
            for j, proj in enumerate((source.k_proj, source.v_proj)):
                targets += (self.source_weight[i, j], self.source_bias[i, j])
                sources += (proj.weight, proj.bias)
        torch._foreach_copy_(targets, sources)

    def source_keys_values(self, memory: Tensor, layer_wise: bool) -> Tensor:
        """Keys and values of all L layers' attentions to the encoder: layers x 2 x S x source x C.

        Args:
            memory: the encoder's output, source x S x C', or x (layers C') with *layer_wise*.
        """
        count, _, dim, source_dim = self.source_weight.shape
        if layer_wise:
            slices = memory.unflatten(-1, (-1, source_dim))
            each = [
                F.linear(slices[:, :, i], self.source_weight[i].flatten(0, 1), self.source_bias[i].flatten())
                for i in range(count)
            ]
            projected = torch.stack(each, dim=2)
        else:
            projected = F.linear(memory, self.source_weight.flatten(0, 2), self.source_bias.flatten())
        return projected.reshape(*memory.shape[:2], count, 2, dim).permute(2, 3, 1, 0, 4)


class DecodeCache:
    """What a step reads and writes, for S sentences of B lanes each; d = C / H.

    Args:
        decoder: a :class:`surface_fusion.models.decoder.SurfaceFusionDecoder`.
        sentences, beam: S and B.
        length, source: how many target and source positions there is room for.
    """

    @torch.inference_mode(False)
    def __init__(self, decoder: Any, sentences: int, beam: int, length: int, source: int) -> None:
        first = layers_of(decoder)[0]
        weight = first.fc1.weight
        count, heads, width = decoder.num_layers, first.self_attn.num_heads, first.self_attn.head_dim
        self.sentences, self.beam, self.length, self.source = sentences, beam, length, source
        self.own = weight.new_empty(count, 2, sentences, heads, length, beam, width)
        self.cross = weight.new_empty(count, 2, sentences, heads, source, width)
        self.surface: Tensor | None = None
        """``att``: keys and values, 2 x S x H' x source x d'; ``mean``, ``max``: vectors, S x 1 x C."""
        if decoder.cfg.surfacefusion == "att":
            surface_heads = decoder.sf_attn.num_heads
            width = decoder.embed_dim // surface_heads
            self.surface = weight.new_empty(2, sentences, surface_heads, source, width)
        elif decoder.cfg.surfacefusion is not None:
            self.surface = weight.new_empty(sentences, 1, decoder.output_embed_dim)
        self.source_bias = weight.new_zeros(sentences, 1, 1, source)
        """0, or -inf at padding."""
        rows = sentences * beam
        self.lanes = torch.arange(beam, device=weight.device)
        self.rows = torch.arange(rows, device=weight.device)
        self.lane_of_row = self.lanes.repeat(sentences)[:, None]
        self.ancestry = self.rows.new_full((rows, length), -1)
        self.order = self.rows.clone()
        """The row that each row continues; the step leaves it as the identity."""
        self.tokens = torch.zeros_like(self.rows)
        self.position = self.rows.new_zeros(1)
        """How many tokens are decoded."""
        self.everything = self.rows.new_full((1,), 2**20)
        """A position behind all."""
        self.kept, self.masked = weight.new_tensor(0.0), weight.new_tensor(-math.inf)

    def clear(self) -> None:
        """As new. Where more than what was written is read, the rest must be zero.

        A masked value counts 0 times itself, which is not 0 if it is NaN.
        """
        for x in (self.own, self.cross, self.source_bias, self.position):
            x.zero_()
        if self.surface is not None:
            self.surface.zero_()
        self.ancestry.fill_(-1)
        self.order.copy_(self.rows)

    def read_source(self, decoder: Any, weights: FusedWeights, out: Mapping[str, list[Tensor]]) -> None:
        """Project what the decoder reads of the encoder's *out* of S' <= S sentences, once for all steps."""
        memory, padding = out["encoder_out"][0], out["encoder_padding_mask"][0]
        length, count = memory.shape[:2]
        layer_wise = decoder.cfg.memory_per_layer
        projected = weights.source_keys_values(memory, layer_wise)
        heads, width = self.cross.shape[3], self.cross.shape[5]
        self.cross[:, :, :count, :, :length].copy_(projected.unflatten(-1, (heads, width)).transpose(3, 4))
        self.source_bias[:count].fill_(-math.inf)
        self.source_bias[:count, 0, 0, :length].masked_fill_(~padding, 0)
        if self.surface is None:
            return
        embedding = out["encoder_embedding"][0]
        if decoder.cfg.surfacefusion == "att":
            key = memory[..., -decoder.cfg.encoder.embed_dim :].transpose(0, 1)
            for i, x in enumerate((decoder.sf_attn.k_proj(key), decoder.sf_attn.v_proj(embedding))):
                self.surface[i, :count, :, :length].copy_(decoder.sf_attn._split_heads(x))
        else:
            self.surface[:count].copy_(embedding)

    def take(self, other: "DecodeCache", sentences: Tensor) -> None:
        """Go on where *other* is with its *sentences* (int64, S' <= S) alone, as the first S' of this."""
        count, source = len(sentences), min(self.source, other.source)
        length = min(self.length, other.length)
        self.own[:, :, :count, :, :length].copy_(other.own.index_select(2, sentences)[..., :length, :, :])
        self.cross[:, :, :count, :, :source].copy_(other.cross.index_select(2, sentences)[..., :source, :])
        bias = other.source_bias.index_select(0, sentences)
        self.source_bias[:count].fill_(-math.inf)
        self.source_bias[:count, ..., :source].copy_(bias[..., :source])
        if self.surface is not None and other.surface is not None:
            if self.surface.dim() == 5:
                surface = other.surface.index_select(1, sentences)
                self.surface[:, :count, :, :source].copy_(surface[..., :source, :])
            else:
                self.surface[:count].copy_(other.surface.index_select(0, sentences))
        rows = (sentences[:, None] * self.beam + self.lanes).flatten()
        self.ancestry[: len(rows), :length].copy_(other.ancestry.index_select(0, rows)[:, :length])
        moved = other.order.index_select(0, rows) % self.beam
        self.order[: len(rows)].copy_(self.rows[: len(rows)] - self.lane_of_row[: len(rows), 0] + moved)
        self.position.copy_(other.position)

    def step(
        self, decoder: Any, weights: FusedWeights, length: int, source: int, with_attention: bool
    ) -> StepOut:
        """Decode one token a row: ``tokens`` at ``position``, continuing the rows ``order``.

        Args:
            length, source: target and source positions that are looked at; the rest is empty.
            with_attention: return the last layer's attention to the source, averaged over its heads.
        """
        rows, sentences, beam = len(self.rows), self.sentences, self.beam
        ancestry = self.ancestry.index_select(0, self.order)
        ancestry.index_copy_(1, self.position, self.lane_of_row)
        self.ancestry.copy_(ancestry)
        self.order.copy_(self.rows)
        in_prefix = ancestry[:, :length, None] == self.lanes
        own_bias = torch.where(in_prefix, self.kept, self.masked).view(sentences, 1, beam, length * beam)
        source_bias = self.source_bias[..., :source]

        x = query = self._embed(decoder)
        combination, kept = decoder.combination, list[Tensor]()
        if combination is not None:
            x = combination(x, kept)
        attention = None
        for i, layer in enumerate(weights.layers):
            own, cross = layer.self_attn, layer.encoder_attn
            heads, width = own.num_heads, own.head_dim
            y = _norm(layer.self_attn_layer_norm, x) if layer.normalize_before else x
            qkv = F.linear(y, *weights.qkv[i]).view(sentences, beam, 3, heads, width)
            written = qkv[:, :, 1:].permute(2, 0, 3, 1, 4).unsqueeze(3)
            self.own[i].index_copy_(3, self.position, written)
            key, value = self.own[i, :, :, :, :length].flatten(3, 4).unbind()
            read = _attend(qkv[:, :, 0].transpose(1, 2), key, value, own_bias, self.position)
            x = F.linear(read.view(rows, -1), own.out_proj.weight, own.out_proj.bias).add_(x)
            if not layer.normalize_before:
                x = _norm(layer.self_attn_layer_norm, x)

            y = _norm(layer.encoder_attn_layer_norm, x) if layer.normalize_before else x
            q = F.linear(y, cross.q_proj.weight, cross.q_proj.bias)
            q = q.view(sentences, beam, heads, width).transpose(1, 2)
            key, value = self.cross[i, :, :, :, :source].unbind()
            read = _attend(q, key, value, source_bias, self.everything)
            if with_attention and layer is weights.layers[-1]:
                scores = q @ key.transpose(2, 3) * width**-0.5 + source_bias
                attention = scores.softmax(dim=-1, dtype=torch.float32).mean(dim=1).to(x.dtype)
            x = F.linear(read.view(rows, -1), cross.out_proj.weight, cross.out_proj.bias).add_(x)
            if not layer.normalize_before:
                x = _norm(layer.encoder_attn_layer_norm, x)

            y = _norm(layer.final_layer_norm, x) if layer.normalize_before else x
            y = layer.activation_fn(F.linear(y, layer.fc1.weight, layer.fc1.bias))
            x = F.linear(y, layer.fc2.weight, layer.fc2.bias).add_(x)
            if not layer.normalize_before:
                x = _norm(layer.final_layer_norm, x)
            last = layer is weights.layers[-1]
            if combination is not None and last:
                x = combination(x, kept)
            if i + 1 == getattr(decoder, "query_depth", None):
                query = x
            if combination is not None and not last:
                x = combination(x, kept)
        self.position.add_(1)

        if decoder.layer_norm is not None:
            x = _norm(decoder.layer_norm, x)
        x = self._project_out(decoder, x.unsqueeze(1))
        features = self._with_surface(decoder, x, query, source_bias)
        return StepOut(features, None if attention is None else attention.flatten(0, 1).unsqueeze(1))

    def _embed(self, decoder: Any) -> Tensor:
        """R x C."""
        x = decoder.embed_scale * F.embedding(self.tokens, decoder.embed_tokens.weight)
        if decoder.project_in_dim is not None:
            x = decoder.project_in_dim(x)
        if decoder.embed_positions is not None:
            table = position_table(decoder)[decoder.padding_idx + 1 :]
            x = x + table.index_select(0, self.position)
        if decoder.layernorm_embedding is not None:
            x = _norm(decoder.layernorm_embedding, x)
        return x

    def _with_surface(self, decoder: Any, x: Tensor, query: Tensor, source_bias: Tensor) -> Tensor:
        """What is projected to the vocabulary, as ``SurfaceFusionDecoder.extract_features`` returns it."""
        if self.surface is None:
            return x
        if decoder.cfg.surfacefusion == "att":
            attn = decoder.sf_attn
            q = F.linear(query, attn.q_proj.weight, attn.q_proj.bias)
            q = q.view(self.sentences, self.beam, attn.num_heads, -1).transpose(1, 2)
            key, value = self.surface[:, :, :, : source_bias.shape[-1]].unbind()
            read = _attend(q, key, value, source_bias, self.everything).view(len(x), 1, -1)
            r = self._project_out(decoder, F.linear(read, attn.out_proj.weight, attn.out_proj.bias))
        else:
            r = self.surface.expand(-1, self.beam, -1).reshape(len(x), 1, -1)
        h, r = decoder._shared_head(torch.stack([x, r])).unbind()
        fused: Tensor = decoder._fuse(decoder._own_head(h, "tgt"), decoder._own_head(r, "src"))
        return fused

    @staticmethod
    def _project_out(decoder: Any, x: Tensor) -> Tensor:
        return x if decoder.project_out_dim is None else F.linear(x, decoder.project_out_dim.weight)


def position_table(decoder: Any) -> Tensor:
    """One position a row, from ``padding_idx + 1`` on."""
    positions = decoder.embed_positions
    table: Tensor = (
        positions.weights if isinstance(positions, SinusoidalPositionalEmbedding) else positions.weight
    )
    return table


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, last: Tensor) -> Tensor:
    """Heads side by side: S x B x (H d) of S x H x B x d queries and S x H x N x d keys.

    Args:
        last: as of :func:`surface_fusion.ops.beam_attention_triton.read_keys`; what is behind it is masked.
    """
    if use_kernels(query) and query.shape[-1] <= NARROW_HEAD:
        from surface_fusion.ops.beam_attention_triton import read_keys

        return read_keys(query, key, value, bias, last)
    if query.is_cuda or len(query) == 1:
        bias = bias.expand(-1, query.shape[1], query.shape[2], -1)
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    else:  # torch's attention gains nothing from a second core with so few queries
        scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(2, 3)).add_(bias)
        read = torch.matmul(scores.softmax(dim=-1), value)
    return read.transpose(1, 2).flatten(2)
