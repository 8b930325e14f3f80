"""Keys and values of beam search that are never reordered, and the joined projections that write them.

The B hypotheses of a sentence (its beams) share one pool of keys and values: position t holds the keys that
each of the B beams computed in step t. When the search continues hypothesis j in beam k, no key moves. Only
row k of a table of resolved back-pointers, ``prefix_beams``, is replaced by row j: it stores which beam
computed each position of the prefix. Attention reads the whole pool and masks the keys that are not part of
the hypothesis's prefix. No layer's cache is reordered, and a sentence's keys, like those of its source, are
read once for all its hypotheses.

All shapes are those of the cache: S sentences x B beams = R rows.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.modules.stacks import layers_of


class FusedWeights:
    """Projections joined into one matrix: q, k, v of each layer; k, v of all layers' encoder attentions.

    The parameters are copied. Call :meth:`refresh` before use: training changes them without notice.
    """

    @torch.inference_mode(False)  # tensors created in inference mode cannot be written outside of it
    def __init__(self, decoder: Any) -> None:
        self.layers = layers_of(decoder)
        weight = self.layers[0].encoder_attn.k_proj.weight
        count, (dim, source_dim) = len(self.layers), weight.shape
        self.qkv_weight = weight.new_empty(count, 3, dim, dim)
        self.qkv_bias = weight.new_empty(count, 3, dim)
        self.qkv = list(zip(self.qkv_weight.flatten(1, 2), self.qkv_bias.flatten(1, 2), strict=True))
        """Weight 3C x C and bias 3C of each layer."""
        self.source_weight = weight.new_empty(count, 2, dim, source_dim)
        self.source_bias = weight.new_empty(count, 2, dim)

    def refresh(self) -> None:
        """Copy the current parameters."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            self_attn, encoder_attn = layer.self_attn, layer.encoder_attn
            for j, proj in enumerate((self_attn.q_proj, self_attn.k_proj, self_attn.v_proj)):
                targets += (self.qkv_weight[i, j], self.qkv_bias[i, j])
                sources += (proj.weight, proj.bias)
            for j, proj in enumerate((encoder_attn.k_proj, encoder_attn.v_proj)):
                targets += (self.source_weight[i, j], self.source_bias[i, j])
                sources += (proj.weight, proj.bias)
        torch._foreach_copy_(targets, sources)

    def source_keys_values(self, memory: Tensor, layer_wise: bool) -> Tensor:
        """Project the keys and values of all layers' encoder attentions: layers x 2 x S x source x C.

        Args:
            memory: the encoder's output, source x S x C'; with *layer_wise* source x S x (layers C').
            layer_wise: whether each layer attends to its own slice of *memory*.
        """
        count, _, dim, source_dim = self.source_weight.shape
        if layer_wise:
            slices = memory.unflatten(-1, (-1, source_dim))
            projections = [
                F.linear(slices[:, :, i], self.source_weight[i].flatten(0, 1), self.source_bias[i].flatten())
                for i in range(count)
            ]
            projected = torch.stack(projections, dim=2)
        else:
            projected = F.linear(memory, self.source_weight.flatten(0, 2), self.source_bias.flatten())
        return projected.reshape(*memory.shape[:2], count, 2, dim).permute(2, 3, 1, 0, 4)


class DecodeCache:
    """The tensors that a decoding step reads and writes, for S sentences of B beams; d = C / H.

    Args:
        decoder: a :class:`surface_fusion.models.decoder.SurfaceFusionDecoder`.
        sentences: S.
        beam: B.
        length: capacity in target positions.
        source: capacity in source positions.
    """

    @torch.inference_mode(False)
    def __init__(self, decoder: Any, sentences: int, beam: int, length: int, source: int) -> None:
        first = layers_of(decoder)[0]
        weight = first.fc1.weight
        count, heads, width = decoder.num_layers, first.self_attn.num_heads, first.self_attn.head_dim
        self.sentences, self.beam, self.length, self.source = sentences, beam, length, source
        self.self_kv = weight.new_empty(count, 2, sentences, heads, length, beam, width)
        self.cross_kv = weight.new_empty(count, 2, sentences, heads, source, width)
        self.surface: Tensor | None = None
        """``att``: keys and values, 2 x S x H' x source x d'; ``mean``, ``max``: vectors, S x 1 x C."""
        if decoder.cfg.surfacefusion == "att":
            surface_heads = decoder.sf_attn.num_heads
            width = decoder.embed_dim // surface_heads
            self.surface = weight.new_empty(2, sentences, surface_heads, source, width)
        elif decoder.cfg.surfacefusion is not None:
            self.surface = weight.new_empty(sentences, 1, decoder.output_embed_dim)
        self.source_bias = weight.new_zeros(sentences, 1, 1, source)
        """0 at source tokens, -inf at padding."""
        rows = sentences * beam
        self.beams = torch.arange(beam, device=weight.device)
        self.rows = torch.arange(rows, device=weight.device)
        self.beam_of_row = self.beams.repeat(sentences)[:, None]
        self.prefix_beams = self.rows.new_full((rows, length), -1)
        """The beam that computed each position of the row's prefix; -1 at positions not decoded yet."""
        self.order = self.rows.clone()
        """The row whose hypothesis each row continues; a step resets it to the identity."""
        self.tokens = torch.zeros_like(self.rows)
        """The token that the next step reads in each row."""
        self.position = self.rows.new_zeros(1)
        """Number of decoded tokens."""
        self.last_position = self.rows.new_full((1,), 2**20)
        """A position beyond every source: encoder attention reads all keys."""
        self.zero, self.minus_inf = weight.new_tensor(0.0), weight.new_tensor(-math.inf)

    def reset(self) -> None:
        """Restore the initial state for another batch.

        Keys and values must be zeroed: attention reads beyond the positions written, and a masked value
        is multiplied by 0, which does not remove a NaN.
        """
        for x in (self.self_kv, self.cross_kv, self.source_bias, self.position):
            x.zero_()
        if self.surface is not None:
            self.surface.zero_()
        self.prefix_beams.fill_(-1)
        self.order.copy_(self.rows)

    def set_encoder_out(
        self, decoder: Any, weights: FusedWeights, encoder_out: Mapping[str, list[Tensor]]
    ) -> None:
        """Project the keys and values of the encoder's output of S' <= S sentences, once for all steps."""
        memory, padding = encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
        length, count = memory.shape[:2]
        projected = weights.source_keys_values(memory, decoder.cfg.memory_per_layer)
        heads, width = self.cross_kv.shape[3], self.cross_kv.shape[5]
        self.cross_kv[:, :, :count, :, :length].copy_(projected.unflatten(-1, (heads, width)).transpose(3, 4))
        self.source_bias[:count].fill_(-math.inf)
        self.source_bias[:count, 0, 0, :length].masked_fill_(~padding, 0)
        if self.surface is None:
            return
        embedding = encoder_out["encoder_embedding"][0]
        if decoder.cfg.surfacefusion == "att":
            key = memory[..., -decoder.cfg.encoder.embed_dim :].transpose(0, 1)
            for i, x in enumerate((decoder.sf_attn.k_proj(key), decoder.sf_attn.v_proj(embedding))):
                self.surface[i, :count, :, :length].copy_(decoder.sf_attn.split_heads(x))
        else:
            self.surface[:count].copy_(embedding)

    def copy_from(self, other: "DecodeCache", sentences: Tensor) -> None:
        """Copy the *sentences* (int64, S' <= S) of *other* to the first S' sentences of this cache."""
        count, source = len(sentences), min(self.source, other.source)
        length = min(self.length, other.length)
        self.self_kv[:, :, :count, :, :length].copy_(
            other.self_kv.index_select(2, sentences)[..., :length, :, :]
        )
        self.cross_kv[:, :, :count, :, :source].copy_(
            other.cross_kv.index_select(2, sentences)[..., :source, :]
        )
        bias = other.source_bias.index_select(0, sentences)
        self.source_bias[:count].fill_(-math.inf)
        self.source_bias[:count, ..., :source].copy_(bias[..., :source])
        if self.surface is not None and other.surface is not None:
            if self.surface.dim() == 5:
                surface = other.surface.index_select(1, sentences)
                self.surface[:, :count, :, :source].copy_(surface[..., :source, :])
            else:
                self.surface[:count].copy_(other.surface.index_select(0, sentences))
        rows = (sentences[:, None] * self.beam + self.beams).flatten()
        self.prefix_beams[: len(rows), :length].copy_(other.prefix_beams.index_select(0, rows)[:, :length])
        parents = other.order.index_select(0, rows) % self.beam
        self.order[: len(rows)].copy_(self.rows[: len(rows)] - self.beam_of_row[: len(rows), 0] + parents)
        self.position.copy_(other.position)

    def apply_order(self, length: int) -> Tensor:
        """Let each row continue the hypothesis of the row ``order``, at ``position``.

        Returns:
            The bias of self-attention over the first *length* positions, S x 1 x B x (length B): 0 for the
            keys of the row's prefix, -inf elsewhere.
        """
        prefix_beams = self.prefix_beams.index_select(0, self.order)
        prefix_beams.index_copy_(1, self.position, self.beam_of_row)
        self.prefix_beams.copy_(prefix_beams)
        self.order.copy_(self.rows)
        in_prefix = prefix_beams[:, :length, None] == self.beams
        bias = torch.where(in_prefix, self.zero, self.minus_inf)
        return bias.view(self.sentences, 1, self.beam, length * self.beam)
