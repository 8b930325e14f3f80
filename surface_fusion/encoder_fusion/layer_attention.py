"""Layer attention: a mix of the encoder's layers for each decoder layer.

    S^m = drop(LN(sum_n w^{m,n} z_n)),  w^m = softmax_n(W^m)

M decoder layers, N states: the encoder's layers and, with ``--encoder-fusion-embedding``, the embedding layer
before them. Its state is the word embeddings without positions (``--ta-posedemb``: with), through dropout
and, in a post-norm encoder, a LayerNorm of their own. One LayerNorm is shared by all m. ``--ta-dropout``
drops elements of w, without renormalising it (with ``--ta-dropconnect``: of W), and of the mix.

Methods: ``transparent.py`` and ``fine_grained.py``. Parameters beyond those that they state: with the
embedding layer, post-norm adds 2 C. ``--ta-ffn`` adds ``2 C F + F + 3 C``: each state z becomes
``LN(z + FFN(z))``, in a pre-norm encoder ``z + FFN(LN(z))``; one layer serves all.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import FusionMethod
from surface_fusion.ops.precision import accumulation_dtype


class LayerAttention(FusionMethod):
    """The mixes of all decoder layers side by side.

    Args:
        states, dim, decoder_layers: N, C and M.
        channels: one weight a channel, as fine-grained attention has.
        embedding: the first state is the embedding layer.
        embedding_dropout: its dropout rate.
        embedding_norm: it has a LayerNorm of its own.
        dropout: dropout rate of the weights and of the mix.
        dropconnect: drop elements of W, not of w.
        ffn_dim: width F of a feed-forward layer over the states; 0: none.
        ffn_dropout, activation_dropout, activation, normalize_before: of the feed-forward layer.
        make_dropout: class of the dropout modules, called with a rate.

    Attributes:
        weight: M x N, or M x N x C.
        silenced: states that get no weight; the weights of the others stay.
    """

    place = "a mix for each decoder layer"
    silenceable = True

    def __init__(
        self,
        states: int,
        dim: int,
        decoder_layers: int,
        channels: bool,
        *,
        embedding: bool = False,
        embedding_dropout: float = 0.0,
        embedding_norm: bool = False,
        dropout: float = 0.1,
        dropconnect: bool = False,
        ffn_dim: int = 0,
        ffn_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.relu,
        normalize_before: bool = False,
        make_dropout: Callable[[float], nn.Module] = nn.Dropout,
    ) -> None:
        super().__init__()
        self.states, self.dim, self.embeds = states, dim, embedding
        self.silenced: list[int] = []
        self.dropout_module = make_dropout(dropout)
        self.dropconnect = dropconnect
        self.embedding_dropout = make_dropout(embedding_dropout)
        self.weight = nn.Parameter(torch.empty(decoder_layers, states, *((dim,) if channels else ())))
        self.layer_norm = nn.LayerNorm(dim)
        self.embedding_norm = nn.LayerNorm(dim) if embedding_norm else None
        self.fc1: Any = None
        self.reset_parameters()
        if ffn_dim:
            self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
            self.ffn_norm = nn.LayerNorm(dim)
            self.activation_fn = activation
            self.activation_dropout = make_dropout(activation_dropout)
            self.ffn_dropout = make_dropout(ffn_dropout)
            self.normalize_before = normalize_before
            if normalize_before:
                # Tells checkpoints with this order from those of version 0.1.0, which normed afterwards.
                self.register_buffer("ffn_norm_first", torch.tensor(True))
            self._reset_ffn()

    def reset_parameters(self) -> None:
        """Xavier initialisation of W and of the feed-forward layer."""
        super().reset_parameters()
        bound = (2 / sum(self.weight.shape[:2])) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.fc1 is not None:
            self._reset_ffn()

    def _reset_ffn(self) -> None:
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if self.normalize_before:
            self.get_buffer("ffn_norm_first").fill_(True)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Mix N states of ... x C for each decoder layer, concatenated: ... x (M C).

        With the embedding layer the first state is the scaled embedding.
        """
        if self.embeds:
            embed = self.embedding_dropout(states[0])
            if self.embedding_norm is not None:
                embed = self.embedding_norm(embed)
            states = [embed, *states[1:]]
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
        weight = F.softmax(raw, dim=1, dtype=accumulation_dtype(raw.dtype))
        return weight if self.dropconnect else self.dropout_module(weight)

    def layer_shares(self) -> Tensor:
        """Weight of each layer for each decoder layer, M x N; over channels the mean, as in the paper."""
        weight = self.layer_weights()
        return weight.mean(-1) if weight.dim() == 3 else weight

    def _transform(self, state: Tensor) -> Tensor:
        if self.fc1 is None:
            return state
        x = self.ffn_norm(state) if self.normalize_before else state
        x = self.activation_dropout(self.activation_fn(self.fc1(x)))
        x = state + self.ffn_dropout(self.fc2(x))
        return x if self.normalize_before else self.ffn_norm(x)
