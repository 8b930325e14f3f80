"""Transparent and fine-grained layer attention: a mix of the encoder's layers for each decoder layer.

    S^m = drop(LN(sum_n w^{m,n} z_n)),  w^m = softmax_n(W^m)

*Transparent* (Bapna et al., 2018, https://arxiv.org/abs/1808.07561): one weight a layer, W is M x N.
*Fine-grained* (Liu et al., ICLR 2021, https://arxiv.org/abs/2012.14768, the probe behind its figure 1):
one a channel, W is M x N x C, in the paper with DropConnect (``--ta-dropconnect``, p = 0.3).

M decoder layers, N encoder layers; with the embedding layer one more in front: the word embeddings without
positions (``--ta-posedemb``: with), through dropout and, in a post-norm encoder, a LayerNorm of their own.
One LayerNorm is shared by all m. ``--ta-dropout`` drops elements of w, without renormalising it (with
``--ta-dropconnect``: of W), and of the mix.

Per decoder layer. Parameters: ``M N + 2 C`` (1,060 for C = 512 and 6 layers), fine-grained ``M N C + 2 C``
(19,456); with the embedding N is one more, and post-norm adds 2 C. ``--ta-ffn`` adds ``2 C F + F + 3 C``:
each state z becomes ``LN(z + FFN(z))``, in a pre-norm encoder ``z + FFN(LN(z))``; one layer serves all.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.modules import FairseqDropout, LayerNorm
from torch import Tensor, nn


class LayerAttention(nn.Module):
    """The mixes of all decoder layers side by side.

    Args:
        cfg: a :class:`surface_fusion.config.model.SurfaceFusionConfig`.
        channels: one weight a channel, as fine-grained attention has.

    Attributes:
        weight: M x N, or M x N x C.
    """

    def __init__(self, cfg: Any, channels: bool) -> None:
        super().__init__()
        self.dim: int = cfg.encoder.embed_dim
        self.states: int = cfg.encoder.layers + cfg.encoder_fusion_embedding
        self.silenced: list[int] = []
        """States that get no weight: what is left of the others is not normalised again."""
        self.embeds: bool = cfg.encoder_fusion_embedding
        self.dropout_module = FairseqDropout(cfg.ta_dropout, module_name="TransformerEncoder")
        self.dropconnect: bool = cfg.ta_dropconnect
        rate = 0.0 if cfg.ta_posedemb else cfg.dropout  # the encoder's input has been dropped out
        self.embedding_dropout = FairseqDropout(rate, module_name="TransformerEncoder")
        shape = (cfg.decoder.layers, self.states, *((self.dim,) if channels else ()))
        bound = (2 / (cfg.decoder.layers + self.states)) ** 0.5
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.layer_norm = LayerNorm(self.dim)
        self.embedding_norm: Any = None
        normed = cfg.encoder_fusion_embedding and not cfg.no_ta_embnorm
        if normed and not cfg.encoder.normalize_before:
            self.embedding_norm = LayerNorm(self.dim)
        self.fc1: Any = None
        if cfg.ta_ffn:
            self._build_ffn(cfg)

    def _build_ffn(self, cfg: Any) -> None:
        self.fc1 = nn.Linear(self.dim, cfg.encoder.ffn_embed_dim)
        self.fc2 = nn.Linear(cfg.encoder.ffn_embed_dim, self.dim)
        for linear in (self.fc1, self.fc2):  # as fairseq's own layers begin
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.ffn_norm = LayerNorm(self.dim)
        self.activation_fn = utils.get_activation_fn(str(cfg.activation_fn))
        name = "TransformerEncoder"
        self.activation_dropout = FairseqDropout(float(cfg.activation_dropout), module_name=name)
        self.ffn_dropout = FairseqDropout(cfg.dropout, module_name=name)
        self.normalize_before: bool = cfg.encoder.normalize_before
        if self.normalize_before:
            # Tells checkpoints with this order from those of version 0.1.0, which normed afterwards.
            self.register_buffer("ffn_norm_first", torch.tensor(True))

    def forward(self, states: list[Tensor]) -> Tensor:
        """Mix N states of ... x C for each decoder layer, concatenated: ... x (M C).

        With the embedding layer the first state is the scaled embedding.
        """
        if self.embeds:
            states = [self._embedding(states[0]), *states[1:]]
        states = [self._transform(state) for state in states]
        weight = self.layer_weights().to(states[0].dtype)
        if self.silenced:
            weight = weight.index_fill(1, torch.tensor(self.silenced, device=weight.device), 0)
        stacked = torch.stack(states)  # N x ... x C
        if weight.dim() == 2:
            mixed = (weight @ stacked.flatten(1)).view(len(weight), *states[0].shape)
        else:
            per_channel = stacked.flatten(1, -2).permute(2, 0, 1)  # C x N x R
            mixed = (weight.permute(2, 0, 1) @ per_channel).permute(1, 2, 0)  # M x R x C
            mixed = mixed.reshape(len(weight), *states[0].shape)
        mixed = self.dropout_module(self.layer_norm(mixed))
        return mixed.movedim(0, -2).flatten(-2)

    def layer_weights(self) -> Tensor:
        """w: M x N, or M x N x C; the sum over N is 1 but for dropout."""
        raw = self.dropout_module(self.weight) if self.dropconnect else self.weight
        weight = F.softmax(raw, dim=1, dtype=torch.promote_types(raw.dtype, torch.float32))
        return weight if self.dropconnect else self.dropout_module(weight)

    def _embedding(self, embed: Tensor) -> Tensor:
        embed = self.embedding_dropout(embed)
        return embed if self.embedding_norm is None else self.embedding_norm(embed)

    def _transform(self, state: Tensor) -> Tensor:
        if self.fc1 is None:
            return state
        x = self.ffn_norm(state) if self.normalize_before else state
        x = self.activation_dropout(self.activation_fn(self.fc1(x)))
        x = state + self.ffn_dropout(self.fc2(x))
        return x if self.normalize_before else self.ffn_norm(x)


class Transparent(LayerAttention):
    """One weight a layer."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg, channels=False)


class FineGrained(LayerAttention):
    """One weight a channel and layer."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg, channels=True)
