"""Decode one token of every hypothesis.

A step does not synchronise with the host, so it can be captured in a CUDA graph. The layers compute what
fairseq's modules compute in evaluation mode, on the cache of ``cache.py``. Shapes are those of the cache:
S sentences x B beams = R rows of width C, with H heads of width d.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from surface_fusion.decoding.cache import DecodeCache, FusedWeights
from surface_fusion.ops.beam_attention import beam_attention


class StepOut(NamedTuple):
    """Features R x 1 x C (or R x 1 x 2 x C) and, if requested, attention to the source, R x 1 x source."""

    features: Tensor
    attention: Tensor | None


def decode_step(
    decoder: Any, weights: FusedWeights, cache: DecodeCache, length: int, source: int, with_attention: bool
) -> StepOut:
    """Decode the tokens ``cache.tokens`` at ``cache.position``; each row continues the row ``cache.order``.

    Args:
        decoder: a :class:`surface_fusion.models.decoder.SurfaceFusionDecoder`.
        weights: its joined projections.
        cache: read and updated.
        length: number of target positions to attend to; later ones are empty.
        source: number of source positions to attend to; later ones are padding.
        with_attention: return the last layer's attention to the source, averaged over its heads.
    """
    self_bias, source_bias = cache.apply_order(length), cache.source_bias[..., :source]
    query_depth = getattr(decoder, "query_depth", None)
    x = query = _embed(decoder, cache)
    combination, states = decoder.combination, list[Tensor]()
    if combination is not None:
        x = combination(x, states)
    attention = None
    for i, layer in enumerate(weights.layers):
        last = i + 1 == len(weights.layers)
        x = _self_attention(cache, weights, i, x, self_bias)
        x, attention = _cross_attention(cache, layer, i, x, source_bias, with_attention and last)
        x = output = _feed_forward(layer, x)
        if combination is not None:
            x = combination(x, states)
        if i + 1 == query_depth:
            query = x if last else output
    cache.position.add_(1)

    if decoder.layer_norm is not None:
        x = _norm(decoder.layer_norm, x)
    x = _project_out(decoder, x.unsqueeze(1))
    features = _fuse_surface(decoder, cache, x, query, source_bias)
    return StepOut(features, None if attention is None else attention.flatten(0, 1).unsqueeze(1))


def _embed(decoder: Any, cache: DecodeCache) -> Tensor:
    """Embed the cache's tokens: R x C."""
    x = decoder.embed_scale * F.embedding(cache.tokens, decoder.embed_tokens.weight)
    if decoder.project_in_dim is not None:
        x = decoder.project_in_dim(x)
    if decoder.embed_positions is not None:
        table = position_table(decoder)[decoder.padding_idx + 1 :]
        x = x + table.index_select(0, cache.position)
    if decoder.layernorm_embedding is not None:
        x = _norm(decoder.layernorm_embedding, x)
    return x


def _self_attention(cache: DecodeCache, weights: FusedWeights, i: int, x: Tensor, bias: Tensor) -> Tensor:
    """Self-attention of layer *i* with its residual connection; stores the keys and values of the token."""
    layer = weights.layers[i]
    attn, length = layer.self_attn, bias.shape[-1] // cache.beam
    y = _norm(layer.self_attn_layer_norm, x) if layer.normalize_before else x
    qkv = F.linear(y, *weights.qkv[i]).view(cache.sentences, cache.beam, 3, attn.num_heads, attn.head_dim)
    new_kv = qkv[:, :, 1:].permute(2, 0, 3, 1, 4).unsqueeze(3)
    cache.self_kv[i].index_copy_(3, cache.position, new_kv)
    key, value = cache.self_kv[i, :, :, :, :length].flatten(3, 4).unbind()
    attended = beam_attention(qkv[:, :, 0].transpose(1, 2), key, value, bias, cache.position)
    x = F.linear(attended.view(len(x), -1), attn.out_proj.weight, attn.out_proj.bias).add_(x)
    return x if layer.normalize_before else _norm(layer.self_attn_layer_norm, x)


def _cross_attention(
    cache: DecodeCache, layer: Any, i: int, x: Tensor, bias: Tensor, with_attention: bool
) -> tuple[Tensor, Tensor | None]:
    """Encoder attention of layer *i* with its residual connection; attention S x B x source if requested."""
    attn = layer.encoder_attn
    y = _norm(layer.encoder_attn_layer_norm, x) if layer.normalize_before else x
    q = F.linear(y, attn.q_proj.weight, attn.q_proj.bias)
    q = q.view(cache.sentences, cache.beam, attn.num_heads, attn.head_dim).transpose(1, 2)
    key, value = cache.cross_kv[i, :, :, :, : bias.shape[-1]].unbind()
    attended = beam_attention(q, key, value, bias, cache.last_position)
    attention = None
    if with_attention:
        scores = q @ key.transpose(2, 3) * attn.head_dim**-0.5 + bias
        attention = scores.softmax(dim=-1, dtype=torch.float32).mean(dim=1).to(x.dtype)
    x = F.linear(attended.view(len(x), -1), attn.out_proj.weight, attn.out_proj.bias).add_(x)
    return x if layer.normalize_before else _norm(layer.encoder_attn_layer_norm, x), attention


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    y = _norm(layer.final_layer_norm, x) if layer.normalize_before else x
    y = layer.activation_fn(F.linear(y, layer.fc1.weight, layer.fc1.bias))
    x = F.linear(y, layer.fc2.weight, layer.fc2.bias).add_(x)
    return x if layer.normalize_before else _norm(layer.final_layer_norm, x)


def _fuse_surface(decoder: Any, cache: DecodeCache, x: Tensor, query: Tensor, source_bias: Tensor) -> Tensor:
    """Fuse the decoder's output with the surface, as ``SurfaceFusionDecoder.extract_features`` does."""
    if cache.surface is None:
        return x
    if decoder.cfg.surfacefusion == "att":
        attn = decoder.sf_attn
        q = F.linear(query, attn.q_proj.weight, attn.q_proj.bias)
        q = q.view(cache.sentences, cache.beam, attn.num_heads, -1).transpose(1, 2)
        key, value = cache.surface[:, :, :, : source_bias.shape[-1]].unbind()
        attended = beam_attention(q, key, value, source_bias, cache.last_position).view(len(x), 1, -1)
        r = _project_out(decoder, F.linear(attended, attn.out_proj.weight, attn.out_proj.bias))
    else:
        r = cache.surface.expand(-1, cache.beam, -1).reshape(len(x), 1, -1)
    h, r = decoder.shared_head(torch.stack([x, r])).unbind()
    fused: Tensor = decoder.fuse(decoder.own_head(h, "tgt"), decoder.own_head(r, "src"))
    return fused


def _project_out(decoder: Any, x: Tensor) -> Tensor:
    return x if decoder.project_out_dim is None else F.linear(x, decoder.project_out_dim.weight)


def position_table(decoder: Any) -> Tensor:
    """The position embeddings, one row per position; positions start at ``padding_idx + 1``."""
    positions = decoder.embed_positions
    table: Tensor = (
        positions.weights if isinstance(positions, SinusoidalPositionalEmbedding) else positions.weight
    )
    return table


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
