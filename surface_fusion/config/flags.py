"""The model's complete configuration: ``EncoderFusionConfig`` plus the flags of surface fusion.

The command line (``add_args``), YAML configs (``model: {_name: transformer_surface_fusion, ...}``)
and the ``args`` of old checkpoints are all read by :meth:`SurfaceFusionConfig.from_namespace`.
"""

import argparse
from dataclasses import dataclass, fields
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import DictConfig

from surface_fusion.config.encoder_fusion_flags import EncoderFusionConfig, flag
from surface_fusion.config.model_checks import SOURCES, check_model
from surface_fusion.errors import SurfaceFusionError, unknown_setting
from surface_fusion.modules.stacks import unwrapped
from surface_fusion.ops.distributions import MODES, Mode

SurfaceSource = ChoiceEnum(list(SOURCES))  # type: ignore[no-untyped-call]
FusionMode = ChoiceEnum(list(MODES))  # type: ignore[no-untyped-call]

SECTIONS = ("encoder", "decoder", "quant_noise")
"""Nested configurations of fairseq's Transformer; ``--encoder-layers`` is ``encoder.layers``."""

PLAIN_HELP = "disable all fast paths: use the plain modules, losses and updates that they are tested against"
"""Help text of ``--sf-plain``, a flag of the model, the criterion and the optimizer."""


# Optional[X], not X | None: fairseq's parser supports only the former.
@dataclass
class SurfaceFusionConfig(EncoderFusionConfig):
    """Flags of fairseq's Transformer, encoder layer fusion and SurfaceFusion (Liu et al., ICLR 2021)."""

    surfacefusion: Optional[SurfaceSource] = flag(  # type: ignore[valid-type]
        "how the softmax layer reads the source embeddings: att (attention from a decoder layer), mean or "
        "max (pooled); default: none, a plain Transformer",
        None,
    )
    attention_dropout: float = flag(
        "dropout probability for attention weights; default 0.1 with --surfacefusion, as published, "
        "otherwise the architecture's (0.0); set it explicitly to compare the two",
        0.0,
    )
    sf_mode: FusionMode = flag(  # type: ignore[valid-type]
        "how target logits z and surface logits s become one distribution: "
        + "; ".join(f"{name}: {mode.formula}" for name, mode in MODES.items()),
        "hard",
    )
    sf_gate: float = flag(
        "weight g of the target branch in hard mode, in (0, 1]; 0 (the default, as published) means a gate "
        "learned per token",
        0.0,
    )
    sf_softmax_tau: float = flag("factor tau on the surface logits in soft, postnorm and postnorm_v1", 1.0)
    sf_renormalize: bool = flag(
        "normalise hard mode, log_softmax(g z + (1-g) s): same greedy choice, one vocabulary projection, "
        "comparable perplexity (not in the published code)"
    )
    sf_linear: bool = flag("apply a linear map to each branch before the output embedding")
    sf_ffn: Optional[bool] = flag(
        "apply one residual feed-forward layer, shared by both branches, before the output embedding (on "
        "by default, as in every published run)",
        None,
    )
    no_sf_ffn: bool = flag("disable --sf-ffn")
    sf_no_posedemb: Optional[bool] = flag(
        "read the source embeddings without positions (on by default, as in every published run)", None
    )
    sf_posedemb: bool = flag("read the encoder's input (embeddings with positions) as source embeddings")
    sf_attention_heads: int = flag("heads of the surface attention (att)", 1)
    sf_idx: Optional[int] = flag(
        "decoder layer whose output is the query of the surface attention; 0 is the first, negative "
        "numbers count from the end; default: the last",
        None,
    )
    sf_no_detach: bool = flag(
        "let the surface attention's gradient reach the decoder (query) and the encoder (key); the "
        "published code detaches both"
    )
    sf_pool_published: bool = flag(
        "mean/max as published: only source tokens with id >= 50 are pooled, and max is never below 0 when "
        "any is left out; default: all tokens but padding. Set for published checkpoints"
    )
    layer_wise_attention: bool = flag(
        "decoder layer i attends to the output of encoder layer i, not of the last"
    )
    source_word_dropout: float = flag("probability of dropping a source word in training", 0.0)
    target_word_dropout: float = flag("probability of dropping a target word in training", 0.0)
    no_encoder_fnn: bool = flag("remove the feed-forward sublayer of encoder layers")
    no_decoder_fnn: bool = flag("remove the feed-forward sublayer of decoder layers")
    sf_plain: bool = flag(PLAIN_HELP)

    def __post_init__(self) -> None:
        # The defaults in fairseq are the section classes: setting a field of one would change all configs.
        for section in SECTIONS:
            if isinstance(getattr(self, section), type):
                setattr(self, section, getattr(self, section)())

    def by_flag(self) -> dict[str, Any]:
        """Return the values by the names of their flags, ``encoder.layers`` as ``encoder_layers``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for section in SECTIONS:
            cfg = values.pop(section)
            values |= {f"{section}_{f.name}": getattr(cfg, f.name) for f in fields(cfg)}
        return values

    @property
    def mode(self) -> Mode:
        """How the flags fuse the two distributions."""
        return MODES[str(self.sf_mode)]

    @property
    def learned_gate(self) -> bool:
        """Whether hard fusion weights the branches by a learned gate (``--sf-gate 0``)."""
        return self.surfacefusion is not None and self.mode.gated and self.sf_gate == 0

    @property
    def unnormalised(self) -> bool:
        """Whether the model's probabilities sum to less than 1, as those of the published hard fusion do."""
        return self.surfacefusion is not None and self.mode.gated and not self.sf_renormalize

    @property
    def fairseqs_own(self) -> bool:
        """Whether fairseq's own encoder and decoder implement all the flags."""
        needs_our_modules = (
            self.surfacefusion is not None,
            self.fusion_method is not None and not self.fusion_method.adds_layers,
            *(self.layer_wise_attention, self.no_encoder_fnn, self.no_decoder_fnn),
            *(self.source_word_dropout > 0, self.target_word_dropout > 0),
        )
        return self.sf_plain and not any(needs_our_modules)

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add each field as a flag, and ``--min-lr``, which fairseq has renamed since publication."""
        gen_parser_from_dataclass(parser, cls(), delete_default=True, with_prefix="")
        parser.add_argument(
            "--min-lr",
            type=float,
            metavar="LR",
            help="old name of --stop-min-lr; accepted so that published commands run",
        )

    @classmethod
    def from_namespace(cls, args: Any) -> "SurfaceFusionConfig":
        """Return the checked configuration of a command line, YAML config or checkpoint.

        Raises:
            SurfaceFusionError: a value is invalid; the message says what to change.
        """
        if isinstance(args, DictConfig):
            known = {"_name", *SECTIONS, *cls().by_flag()}
            for key in map(str, args):
                if key not in known:
                    fault = f"model.{key} in the YAML config is not an option of this model"
                    raise unknown_setting(fault, key, known)
        cfg: SurfaceFusionConfig = super().from_namespace(args)
        try:
            cfg.decoder.output_dim = int(cfg.decoder.output_dim)  # the command line leaves it a string
        except ValueError:
            raise SurfaceFusionError(
                f"--decoder-output-dim {cfg.decoder.output_dim}: give an integer"
            ) from None
        check_model(cfg)
        return cfg


def config_of(model: Any) -> SurfaceFusionConfig | None:
    """Return the configuration of *model*, possibly in distributed wrappers; None if it is another model."""
    cfg = getattr(getattr(unwrapped(model), "decoder", None), "cfg", None)
    return cfg if isinstance(cfg, SurfaceFusionConfig) else None
