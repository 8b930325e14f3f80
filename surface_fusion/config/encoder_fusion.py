"""Flags of encoder layer fusion (``--encoder-fusion``), a part of the model's dataclass.

``--transparent-attention`` and the ``--ta-`` flags are the published names of two of the methods; both names
set the same fields.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer import TransformerConfig

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

NAMES = (
    *("average", "concat", "dwatt", "extra-layers", "transparent", "fine-grained"),
    *("dlcl", "representation", "dense", "lstm", "routing"),
)
PER_DECODER_LAYER = ("transparent", "fine-grained")
IN_BOTH_STACKS = ("dlcl", "dense")
EncoderFusionName = ChoiceEnum(list(NAMES))  # type: ignore[no-untyped-call]


# Optional[X], not X | None: fairseq's parser supports only the former.
@dataclass
class EncoderFusionConfig(TransformerConfig):
    """Flags of fairseq's Transformer and of encoder layer fusion."""

    encoder_fusion: Optional[EncoderFusionName] = field(  # type: ignore[valid-type]
        default=None,
        metadata={
            "help": "how to combine the encoder's layers into the decoder's memory; on the encoder's output: "
            "average, concat, dwatt, representation, lstm, routing, extra-layers; a mix for each decoder "
            "layer: transparent, fine-grained; inside both stacks: dlcl, dense; default: the last layer only"
        },
    )
    encoder_fusion_embedding: bool = field(
        default=False,
        metadata={"help": "include the embedding layer in --encoder-fusion, as layer 0"},
    )
    no_encoder_fusion_embedding: bool = field(
        default=False,
        metadata={
            "help": "dlcl, dense: by default every layer also reads the embedding layer; with this flag only "
            "the first does"
        },
    )
    extra_encoder_layers: int = field(
        default=1, metadata={"help": "number of layers that --encoder-fusion extra-layers adds"}
    )
    dwatt_bottleneck: int = field(
        default=0, metadata={"help": "width inside dwatt's feed-forward maps; 0: half the encoder's"}
    )
    dwatt_d_pos: int = field(default=24, metadata={"help": "width of dwatt's layer positions"})
    dwatt_scaling: bool = field(
        default=False, metadata={"help": "divide dwatt's scores by the square root of the width"}
    )
    routing_capsules: int = field(
        default=8, metadata={"help": "output capsules of routing; must divide the encoder's width"}
    )
    routing_iterations: int = field(default=3, metadata={"help": "iterations of routing"})
    transparent_attention: bool = field(
        default=False,
        metadata={
            "help": "published name of --encoder-fusion transparent (with --fine-grained-ta: fine-grained)"
        },
    )
    fine_grained_ta: bool = field(
        default=False, metadata={"help": "one weight for each channel, with --transparent-attention"}
    )
    ta_source_embedding: bool = field(
        default=False, metadata={"help": "published name of --encoder-fusion-embedding"}
    )
    ta_posedemb: bool = field(
        default=False,
        metadata={
            "help": "transparent, fine-grained: layer 0 is the encoder's input, embeddings with positions"
        },
    )
    no_ta_embnorm: bool = field(
        default=False,
        metadata={"help": "transparent, fine-grained: no LayerNorm over layer 0 (pre-norm has none)"},
    )
    ta_ffn: bool = field(
        default=False,
        metadata={
            "help": "transparent, fine-grained: a feed-forward layer with LayerNorm over all layers' outputs"
        },
    )
    ta_dropout: float = field(
        default=0.1,
        metadata={"help": "transparent, fine-grained: dropout of the weights and of the mix"},
    )
    ta_dropconnect: bool = field(
        default=False,
        metadata={"help": "transparent, fine-grained: drop weights before their softmax (DropConnect)"},
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """Read *args*; fairseq's version would take our ``encoder_...`` fields for fields of *encoder*."""
        if name in ("encoder_fusion", "encoder_fusion_embedding"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def memory_per_layer(self) -> bool:
        """Whether each decoder layer attends to a memory of its own."""
        return bool(getattr(self, "layer_wise_attention", False)) or self.encoder_fusion in PER_DECODER_LAYER

    @property
    def extra_layer_numbers(self) -> range:
        """Indices of the encoder layers that ``extra-layers`` adds."""
        layers = self.encoder.layers
        extra = self.extra_encoder_layers if self.encoder_fusion == "extra-layers" else 0
        return range(layers, layers + extra)

    def check_encoder_fusion(self) -> None:
        """Raise :class:`SurfaceFusionError` for a value that a model cannot be built with."""
        name, dim = self.encoder_fusion, self.encoder.embed_dim
        for flag, useful in (
            ("encoder_fusion_embedding", name not in (None, "extra-layers", *IN_BOTH_STACKS)),
            ("no_encoder_fusion_embedding", name in IN_BOTH_STACKS),
        ):
            if getattr(self, flag) and not useful:
                given = f"with --encoder-fusion {name}" if name else "since --encoder-fusion is not given"
                logger.warning(f"--{flag.replace('_', '-')}: without effect {given}")
        if name is None:
            return
        if name not in NAMES:
            raise SurfaceFusionError(f"--encoder-fusion {name}: unknown, choose one of {', '.join(NAMES)}")
        if self.no_cross_attention:
            raise SurfaceFusionError(
                f"--encoder-fusion {name} is for a decoder that attends to the encoder; leave out "
                "--no-cross-attention"
            )
        if getattr(self, "layer_wise_attention", False):
            raise SurfaceFusionError(
                f"--layer-wise-attention and --encoder-fusion {name} both say what the decoder attends to; "
                "leave one out"
            )
        if name == "extra-layers" and self.extra_encoder_layers < 1:
            raise SurfaceFusionError(
                f"--extra-encoder-layers {self.extra_encoder_layers} adds nothing; give 1 or more"
            )
        if name == "routing" and (self.routing_capsules < 1 or dim % self.routing_capsules):
            raise SurfaceFusionError(
                f"--routing-capsules {self.routing_capsules} does not divide --encoder-embed-dim {dim}; "
                "choose a number that does"
            )
        if name == "routing" and self.routing_iterations < 1:
            raise SurfaceFusionError(
                f"--routing-iterations {self.routing_iterations}: routing needs at least 1"
            )
        if name == "dwatt" and (self.dwatt_bottleneck < 0 or self.dwatt_d_pos < 1):
            raise SurfaceFusionError(
                f"--dwatt-bottleneck {self.dwatt_bottleneck} --dwatt-d-pos {self.dwatt_d_pos}: widths are "
                "positive (a bottleneck of 0 is half the encoder's width)"
            )
        for stack in ("encoder", "decoder"):
            if getattr(self, stack).layers < 1:
                raise SurfaceFusionError(f"--encoder-fusion {name} needs {stack} layers, got none")


def settle_encoder_fusion(args: Any, published: bool) -> None:
    """Translate the published flags in *args* to ``--encoder-fusion``; idempotent.

    The published code ignores ``--transparent-attention`` without ``--layer-wise-attention``. Here the flag
    is sufficient, except for checkpoints of the *published* code, which keep its behaviour.

    Raises:
        SurfaceFusionError: the two spellings ask for different methods.
    """
    if args.transparent_attention:
        method = "fine-grained" if args.fine_grained_ta else "transparent"
        if args.encoder_fusion is None and not args.layer_wise_attention:
            if published:
                args.transparent_attention = False
                return
            logger.warning(
                "--transparent-attention without --layer-wise-attention had no effect in the published code; "
                "here it has: leave it out to continue such a training"
            )
        if args.encoder_fusion not in (None, method):
            raise SurfaceFusionError(
                f"--transparent-attention asks for --encoder-fusion {method}, but --encoder-fusion "
                f"{args.encoder_fusion} is given; leave one out"
            )
        args.encoder_fusion = method
        args.layer_wise_attention = False
    if args.encoder_fusion in PER_DECODER_LAYER and args.ta_source_embedding:
        args.encoder_fusion_embedding = True
