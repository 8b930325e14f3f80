"""Flags of encoder layer fusion (``--encoder-fusion``), a part of the model's dataclass.

The choices and what they accept are read from the registered methods. An option of a method is the flag
``--METHOD-OPTION`` if there is a field of that name, and otherwise a key of ``--encoder-fusion-options``.

``--transparent-attention`` and the ``--ta-`` flags are the published names of two of the methods; both names
set the same fields.
"""

import ast
import logging
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.models.transformer import TransformerConfig

from surface_fusion.encoder_fusion import FusionMethod, LayerAttention, methods, options_of
from surface_fusion.encoder_fusion.registry import BASES
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def flag(text: str, default: Any = False) -> Any:
    """Return a field that is a flag with the help *text*."""
    return field(default=default, metadata={"help": text})


# Optional[X], not X | None: fairseq's parser supports only the former.
@dataclass
class EncoderFusionConfig(TransformerConfig):
    """Flags of fairseq's Transformer and of encoder layer fusion."""

    encoder_fusion: Optional[str] = flag(
        "how to combine the encoder's layers into what the decoder attends to", None
    )
    encoder_fusion_options: Optional[str] = flag(
        "options of a method that have no flag of their own, as Python's keyword arguments: "
        "KEY=VALUE,KEY=VALUE",
        None,
    )
    encoder_fusion_embedding: bool = flag("include the embedding layer in --encoder-fusion, as layer 0")
    no_encoder_fusion_embedding: bool = flag(
        "dlcl, dense: by default every layer also reads the embedding layer; with this flag only the first "
        "does"
    )
    extra_encoder_layers: int = flag("number of layers that --encoder-fusion extra-layers adds", 1)
    dwatt_bottleneck: int = flag("width inside dwatt's feed-forward maps; 0: half the encoder's", 0)
    dwatt_d_pos: int = flag("width of dwatt's layer positions", 24)
    dwatt_scaling: bool = flag("divide dwatt's scores by the square root of the width")
    routing_capsules: int = flag("output capsules of routing; must divide the encoder's width", 8)
    routing_iterations: int = flag("iterations of routing", 3)
    transparent_attention: bool = flag(
        "published name of --encoder-fusion transparent (with --fine-grained-ta: fine-grained)"
    )
    fine_grained_ta: bool = flag("one weight for each channel, with --transparent-attention")
    ta_source_embedding: bool = flag("published name of --encoder-fusion-embedding")
    ta_posedemb: bool = flag(
        "transparent, fine-grained: layer 0 is the encoder's input, embeddings with positions"
    )
    no_ta_embnorm: bool = flag("transparent, fine-grained: no LayerNorm over layer 0 (pre-norm has none)")
    ta_ffn: bool = flag(
        "transparent, fine-grained: a feed-forward layer with LayerNorm over all layers' outputs"
    )
    ta_dropout: float = flag("transparent, fine-grained: dropout of the weights and of the mix", 0.1)
    ta_dropconnect: bool = flag("transparent, fine-grained: drop weights before their softmax (DropConnect)")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; fairseq would take our ``encoder_fusion...`` fields for fields of *encoder*."""
        if name.startswith("encoder_fusion"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _get_help(self, attribute_name: str) -> Any:
        """Help of a flag; of ``--encoder-fusion`` with the methods that are registered now."""
        text = super()._get_help(attribute_name)
        if attribute_name != "encoder_fusion":
            return text
        lists = (f"{base.place}: {', '.join(methods(base))}" for base in BASES)
        return "; ".join((text, *lists, "default: the last layer only"))

    @property
    def memory_per_layer(self) -> bool:
        """Whether each decoder layer attends to a memory of its own."""
        per_layer = self.encoder_fusion in methods(LayerAttention)
        return bool(getattr(self, "layer_wise_attention", False)) or per_layer

    @property
    def fusion_method(self) -> type[FusionMethod] | None:
        """The class of ``--encoder-fusion``; None without the flag, and if no such method is registered."""
        return methods().get(self.encoder_fusion or "")

    @property
    def extra_layer_numbers(self) -> range:
        """Indices of the encoder layers that the method adds; empty for most methods."""
        method, layers = self.fusion_method, self.encoder.layers
        return range(layers, layers + self.extra_encoder_layers * (method is not None and method.adds_layers))

    def fusion_options(self, method: type[FusionMethod]) -> dict[str, Any]:
        """Return the options of *method* from its own flags and ``--encoder-fusion-options``.

        Raises:
            SurfaceFusionError: an option does not exist, or its value is of another type than its default.
        """
        options = options_of(method)
        flags = {}
        if method.__module__.startswith("surface_fusion."):  # others may have names like "attention"
            prefix = method.name.replace("-", "_")
            names = {name: f"{prefix}_{name}" for name in options if hasattr(type(self), f"{prefix}_{name}")}
            flags = {name: getattr(self, flag) for name, flag in names.items()}
        text = str(self.encoder_fusion_options or "")
        values = _keyword_arguments(text)
        if values is None or not values.keys() <= options.keys() - flags.keys():
            known = ", ".join(f"{name}={options[name]!r}" for name in options if name not in flags)
            raise SurfaceFusionError(
                f"--encoder-fusion-options {text}: --encoder-fusion {method.name} takes "
                + (f"KEY=VALUE,KEY=VALUE of {known}" if known else "no options")
            )
        for name, value in values.items():
            default = options[name]
            to_float = type(default) is float and type(value) is int and abs(value) < 2**53
            options[name] = float(value) if to_float else value
            if default is not None and type(options[name]) is not type(default):
                raise SurfaceFusionError(
                    f"--encoder-fusion-options {name}={value!r}: give a value of type "
                    f"{type(default).__name__}, such as {default!r}"
                )
        return options | flags


def _keyword_arguments(text: str) -> dict[str, Any] | None:
    """Parse ``a=1,b=word`` as the keyword arguments of a call, literals and words; None if it is not that."""
    try:
        call: Any = ast.parse(f"f({text})", mode="eval").body
        values = {str(k.arg): k.value for k in call.keywords}
        if call.args or len(values) < len(call.keywords):  # a key is given twice
            return None
        return {k: v.id if isinstance(v, ast.Name) else ast.literal_eval(v) for k, v in values.items()}
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return None


def normalise_encoder_fusion(args: Any, published: bool) -> None:
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
    if args.encoder_fusion in methods(LayerAttention) and args.ta_source_embedding:
        args.encoder_fusion_embedding = True
