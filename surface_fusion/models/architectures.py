"""Named architectures for ``-a NAME``. Each sets sizes, then calls :func:`base_architecture`."""

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fairseq.models import register_model_architecture
from fairseq.models.transformer import transformer_legacy as plain

from surface_fusion.config.defaults import fill_defaults, flatten_sections
from surface_fusion.config.training_flags import normalise_training_flags
from surface_fusion.models.transformer_surface_fusion import MODEL_NAME

logger = logging.getLogger(__name__)

ATTENTION_DROPOUT = 0.1  # the default with --surfacefusion, as in the published code


def _prepare(args: Any, plain_architecture: Callable[[Any], None] = plain.base_architecture) -> None:
    """Flatten YAML sections and set the default of ``--attention-dropout``; call it before sizes are set.

    Without ``--surfacefusion`` the default is that of *plain_architecture*. If they differ, a line is logged.
    """
    flatten_sections(args)
    if getattr(args, "surfacefusion", None) is None or hasattr(args, "attention_dropout"):
        return
    args.attention_dropout = ATTENTION_DROPOUT
    plain_defaults = Namespace()
    plain_architecture(plain_defaults)
    if plain_defaults.attention_dropout != ATTENTION_DROPOUT:
        logger.info(
            f"--attention-dropout {ATTENTION_DROPOUT}: the default with --surfacefusion, as published; "
            f"without --surfacefusion it is {plain_defaults.attention_dropout}: to compare the two, give "
            "--attention-dropout to both trainings"
        )


@register_model_architecture(MODEL_NAME, MODEL_NAME)
def base_architecture(args: Any) -> None:
    """6+6 layers, 512/2048, 8 heads: the paper's base model."""
    _prepare(args)
    plain.base_architecture(args)
    fill_defaults(args)
    normalise_training_flags(args)


@register_model_architecture(MODEL_NAME, f"{MODEL_NAME}_tiny")
def tiny(args: Any) -> None:
    """4+4 layers, 128/256, 4 heads: the size used on Multi30k."""
    _prepare(args)
    sizes = {"embed_dim": 128, "ffn_embed_dim": 256, "layers": 4, "attention_heads": 4}
    for stack in ("encoder", "decoder"):
        for name, size in sizes.items():
            setattr(args, f"{stack}_{name}", getattr(args, f"{stack}_{name}", size))
    base_architecture(args)


def _sized_like(plain_architecture: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a SurfaceFusion architecture with the sizes of one of fairseq's Transformers."""

    def architecture(args: Any) -> None:
        _prepare(args, plain_architecture)
        plain_architecture(args)
        base_architecture(args)

    return architecture


for _name, _plain in (
    ("iwslt_de_en", plain.transformer_iwslt_de_en),
    ("vaswani_wmt_en_de_big", plain.transformer_vaswani_wmt_en_de_big),
    ("wmt_en_de_big", plain.transformer_wmt_en_de_big),
):
    register_model_architecture(MODEL_NAME, f"{MODEL_NAME}_{_name}")(_sized_like(_plain))
