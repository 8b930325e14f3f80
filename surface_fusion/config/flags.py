"""The model's complete configuration: ``EncoderFusionConfig`` plus the flags of surface fusion.

Each field is a flag with its help text.

The command line (``add_args``), YAML configs (``model: {_name: transformer_surface_fusion, ...}``)
and the ``args`` of old checkpoints are all read by :meth:`SurfaceFusionConfig.from_namespace`.
"""

import argparse
import logging
import math
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import DictConfig

from surface_fusion.config.encoder_fusion_flags import EncoderFusionConfig
from surface_fusion.config.ranges import RANGES, check_ranges
from surface_fusion.errors import SurfaceFusionError, unknown_setting
from surface_fusion.modules.stacks import unwrapped
from surface_fusion.ops.distributions import MODES, Mode

logger = logging.getLogger(__name__)

SOURCES = ("att", "mean", "max")
SurfaceSource = ChoiceEnum(list(SOURCES))  # type: ignore[no-untyped-call]
FusionMode = ChoiceEnum(list(MODES))  # type: ignore[no-untyped-call]

SECTIONS = ("encoder", "decoder", "quant_noise")
"""Nested configurations of fairseq's Transformer; ``--encoder-layers`` is ``encoder.layers``."""

FUSION_ONLY = ("sf_mode", "sf_gate", "sf_softmax_tau", "sf_renormalize", "sf_linear", "sf_idx")
"""Fields that have an effect only with ``--surfacefusion``."""

PLAIN_HELP = "disable all fast paths: use the plain modules, losses and updates that they are tested against"
"""Help text of ``--sf-plain``, a flag of the model, the criterion and the optimizer."""


# Optional[X], not X | None: fairseq's parser supports only the former.
@dataclass
class SurfaceFusionConfig(EncoderFusionConfig):
    """Flags of fairseq's Transformer, encoder layer fusion and SurfaceFusion (Liu et al., ICLR 2021)."""

    surfacefusion: Optional[SurfaceSource] = field(  # type: ignore[valid-type]
        default=None,
        metadata={
            "help": "how the softmax layer reads the source embeddings: att (attention from a decoder "
            "layer), mean or max (pooled); default: none, a plain Transformer"
        },
    )
    attention_dropout: float = field(
        default=0.0,
        metadata={
            "help": "dropout probability for attention weights; default 0.1 with --surfacefusion, as "
            "published, otherwise the architecture's (0.0); set it explicitly to compare the two"
        },
    )
    sf_mode: FusionMode = field(  # type: ignore[valid-type]
        default="hard",
        metadata={
            "help": "how target logits z and surface logits s become one distribution: "
            + "; ".join(f"{name}: {mode.formula}" for name, mode in MODES.items())
        },
    )
    sf_gate: float = field(
        default=0.0,
        metadata={
            "help": "weight g of the target branch in hard mode, in (0, 1]; 0 (the default, as published) "
            "means a gate learned per token"
        },
    )
    sf_softmax_tau: float = field(
        default=1.0,
        metadata={"help": "factor tau on the surface logits in soft, postnorm and postnorm_v1"},
    )
    sf_renormalize: bool = field(
        default=False,
        metadata={
            "help": "normalise hard mode, log_softmax(g z + (1-g) s): same greedy choice, one vocabulary "
            "projection, comparable perplexity (not in the published code)"
        },
    )
    sf_linear: bool = field(
        default=False,
        metadata={"help": "apply a linear map to each branch before the output embedding"},
    )
    sf_ffn: Optional[bool] = field(
        default=None,
        metadata={
            "help": "apply one residual feed-forward layer, shared by both branches, before the output "
            "embedding (on by default, as in every published run)"
        },
    )
    no_sf_ffn: bool = field(default=False, metadata={"help": "disable --sf-ffn"})
    sf_no_posedemb: Optional[bool] = field(
        default=None,
        metadata={
            "help": "read the source embeddings without positions (on by default, as in every published run)"
        },
    )
    sf_posedemb: bool = field(
        default=False,
        metadata={"help": "read the encoder's input (embeddings with positions) as source embeddings"},
    )
    sf_attention_heads: int = field(default=1, metadata={"help": "heads of the surface attention (att)"})
    sf_idx: Optional[int] = field(
        default=None,
        metadata={
            "help": "decoder layer whose output is the query of the surface attention; 0 is the first, "
            "negative numbers count from the end; default: the last"
        },
    )
    sf_no_detach: bool = field(
        default=False,
        metadata={
            "help": "let the surface attention's gradient reach the decoder (query) and the encoder (key); "
            "the published code detaches both"
        },
    )
    sf_pool_published: bool = field(
        default=False,
        metadata={
            "help": "mean/max as published: only source tokens with id >= 50 are pooled, and max is never "
            "below 0 when any is left out; default: all tokens but padding. Set for published checkpoints"
        },
    )
    layer_wise_attention: bool = field(
        default=False,
        metadata={"help": "decoder layer i attends to the output of encoder layer i, not of the last"},
    )
    source_word_dropout: float = field(
        default=0.0, metadata={"help": "probability of dropping a source word in training"}
    )
    target_word_dropout: float = field(
        default=0.0, metadata={"help": "probability of dropping a target word in training"}
    )
    no_encoder_fnn: bool = field(
        default=False, metadata={"help": "remove the feed-forward sublayer of encoder layers"}
    )
    no_decoder_fnn: bool = field(
        default=False, metadata={"help": "remove the feed-forward sublayer of decoder layers"}
    )
    sf_plain: bool = field(default=False, metadata={"help": PLAIN_HELP})

    def __post_init__(self) -> None:
        # The defaults in fairseq are the section classes: setting a field of one would change all configs.
        for section in SECTIONS:
            if isinstance(getattr(self, section), type):
                setattr(self, section, getattr(self, section)())

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
            *(self.surfacefusion is not None, self.encoder_fusion not in (None, "extra-layers")),
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
            cls._check_keys(args)
        cfg: SurfaceFusionConfig = super().from_namespace(args)
        cfg.decoder.output_dim = int(cfg.decoder.output_dim)  # the command line leaves it a string
        cfg.check()
        return cfg

    @classmethod
    def _check_keys(cls, yaml: DictConfig) -> None:
        """Reject a misspelt YAML key, as the command line rejects a misspelt flag."""
        known = {"_name", *SECTIONS, *(f.name for f in fields(cls))}
        for section in SECTIONS:
            known |= {f"{section}_{f.name}" for f in fields(getattr(cls(), section))}
        for key in map(str, yaml):
            if key not in known:
                fault = f"model.{key} in the YAML config is not an option of this model"
                raise unknown_setting(fault, key, known)

    def check(self) -> None:
        """Check all values.

        Raises:
            SurfaceFusionError: a value is invalid.
        """
        if self.__dict__.get("addtional_source_output") == "final":
            raise SurfaceFusionError(
                "--addtional-source-output final crashes in the published code and is unsupported; remove it"
            )
        self._check_numbers()
        if self.target_word_dropout > 0 and self.decoder.input_dim != self.decoder.embed_dim:
            raise SurfaceFusionError(
                f"--target-word-dropout needs --decoder-input-dim ({self.decoder.input_dim}) to equal "
                f"--decoder-embed-dim ({self.decoder.embed_dim})"
            )
        shared = (
            self.share_decoder_input_output_embed or self.share_all_embeddings or self.merge_src_tgt_embed
        )
        widths_differ = self.decoder.output_dim != self.decoder.embed_dim
        if shared and widths_differ and self.adaptive_softmax_cutoff is None:
            raise SurfaceFusionError(
                f"--decoder-output-dim {self.decoder.output_dim}: an output layer that shares the decoder's "
                f"embedding has its width, {self.decoder.embed_dim}; leave it out"
            )
        heads = (
            ("encoder", self.encoder.embed_dim, self.encoder.attention_heads),
            ("decoder", self.decoder.embed_dim, self.decoder.attention_heads),
        )
        for stack, dim, count in heads:
            if count < 1 or dim % count:
                raise SurfaceFusionError(
                    f"--{stack}-attention-heads {count} does not divide --{stack}-embed-dim {dim}; "
                    "choose a number of heads that does"
                )
        if self.layer_wise_attention and self.encoder.layers < self.decoder.layers:
            raise SurfaceFusionError(
                f"--layer-wise-attention needs an encoder layer for each decoder layer, got "
                f"{self.encoder.layers} encoder and {self.decoder.layers} decoder layers"
            )
        self.check_encoder_fusion()
        untrained = self.encoder.layers - self.decoder.layers
        key_is_trained = self.surfacefusion == "att" and self.sf_no_detach
        if self.layer_wise_attention and untrained and not key_is_trained:
            logger.warning(
                f"--layer-wise-attention: no decoder layer attends to the last {untrained} encoder layers, "
                "they are not trained"
            )
        if self.surfacefusion is not None:
            self._check_fusion()
            return
        unused = [f for f in fields(self) if f.name in FUSION_ONLY and getattr(self, f.name) != f.default]
        if unused:
            flags = ", ".join("--" + f.name.replace("_", "-") for f in unused)
            logger.warning(f"{flags}: no effect without --surfacefusion")

    def _check_numbers(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for section in SECTIONS:
            section_cfg = values.pop(section)
            values |= {f"{section}_{f.name}": getattr(section_cfg, f.name) for f in fields(section_cfg)}
        for name, value in values.items():
            if name in RANGES and isinstance(value, str):
                raise SurfaceFusionError(f"--{name.replace('_', '-')} {value!r}: give a number")
        check_ranges(values)
        for stack, learned in (("encoder", self.encoder.learned_pos), ("decoder", self.decoder.learned_pos)):
            dim = values[f"{stack}_embed_dim"]
            if dim < 4 and not learned and not self.no_token_positional_embeddings:
                raise SurfaceFusionError(
                    f"--{stack}-embed-dim {dim} is too small for sinusoidal positions; give 4 or more"
                )

    def _check_fusion(self) -> None:
        if self.surfacefusion not in SOURCES:
            raise SurfaceFusionError(
                f"--surfacefusion {self.surfacefusion}: unknown, choose one of {', '.join(SOURCES)}"
            )
        if self.sf_mode not in MODES:
            raise SurfaceFusionError(f"--sf-mode {self.sf_mode}: unknown, choose one of {', '.join(MODES)}")
        if not 0 <= self.sf_gate <= 1:
            raise SurfaceFusionError(
                f"--sf-gate {self.sf_gate} is outside [0, 1]; give the weight of the target branch, or 0 "
                "for a learned gate"
            )
        if not 0 <= self.sf_softmax_tau < math.inf:
            raise SurfaceFusionError(
                f"--sf-softmax-tau {self.sf_softmax_tau} is not a valid factor; give a number of at least 0 "
                "(0: the surface logits have no effect)"
            )
        if self.sf_renormalize and not self.mode.gated:
            raise SurfaceFusionError(
                f"--sf-renormalize needs --sf-mode hard; {self.sf_mode} is normalised already: leave it out"
            )
        if self.adaptive_softmax_cutoff is not None:
            raise SurfaceFusionError(
                f"--adaptive-softmax-cutoff {self.adaptive_softmax_cutoff} cannot be used with "
                "--surfacefusion: both branches need the full output embedding; leave it out"
            )
        dim = self.decoder.embed_dim
        if self.surfacefusion == "att":
            if self.sf_attention_heads < 1 or dim % self.sf_attention_heads:
                raise SurfaceFusionError(
                    f"--sf-attention-heads {self.sf_attention_heads} does not divide --decoder-embed-dim "
                    f"{dim}; choose a number of heads that does"
                )
            layers = self.decoder.layers
            if layers < 1:
                raise SurfaceFusionError(
                    f"--surfacefusion att with --decoder-layers {layers}: its query is the output of a "
                    "decoder layer; give 1 or more layers, or use mean or max"
                )
            idx = -1 if self.sf_idx is None else self.sf_idx
            if not -layers <= idx < layers:
                raise SurfaceFusionError(
                    f"--sf-idx {idx} is out of range for {layers} decoder layers; give a value from "
                    f"{-layers} to {layers - 1}"
                )
        elif self.encoder.embed_dim != self.decoder.output_dim:
            raise SurfaceFusionError(
                f"--surfacefusion {self.surfacefusion} needs --encoder-embed-dim "
                f"({self.encoder.embed_dim}) to equal --decoder-output-dim "
                f"({self.decoder.output_dim}); use att or equal sizes"
            )


def config_of(model: Any) -> SurfaceFusionConfig | None:
    """Return the configuration of *model*, possibly in distributed wrappers; None if it is another model."""
    cfg = getattr(getattr(unwrapped(model), "decoder", None), "cfg", None)
    return cfg if isinstance(cfg, SurfaceFusionConfig) else None
