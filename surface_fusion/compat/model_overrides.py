"""Reject unknown names in ``--model-overrides`` and in the keywords of ``from_pretrained``.

fairseq silently ignores them.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf

from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import unknown_setting

MODEL_NAME = "transformer_surface_fusion"
"""The registered name of this package's model, with which those of its architectures begin."""


@repair("fairseq.checkpoint_utils.load_checkpoint_to_cpu", probe="misspelt_override_is_ignored")
def refuse_unknown_names(
    load: Original, path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Refuse unknown names in ``--model-overrides`` for models of this package."""
    state = load(path, arg_overrides, *args, **kwargs)
    model = getattr(state.get("cfg"), "model", None)
    name = str(getattr(model, "arch", None) or getattr(model, "_name", None))
    if arg_overrides and name.startswith(MODEL_NAME):
        # fairseq's hub passes generation_args along with the overrides; the others have no flag.
        known = {*_names(state["cfg"]), "generation_args", "arch", "decoder_input_dim"}
        for key in arg_overrides:
            if key not in known:
                raise unknown_setting(f"override {key!r} of {path} is not a setting of its model", key, known)
    return state


def _names(cfg: DictConfig) -> Iterator[str]:
    """All valid names of settings. The model's Namespace is not read: it already contains the overrides."""
    for section in (str(name) for name in cfg if not OmegaConf.is_missing(cfg, name)):
        yield section
        if isinstance(cfg[section], DictConfig):
            yield from map(str, cfg[section])
    parser = ArgumentParser(add_help=False)
    MODEL_REGISTRY[MODEL_NAME].add_args(parser)
    yield from (action.dest for action in parser._actions)
    configs = [config for field in fields(FairseqConfig) for config in (field.type, field.default)]
    for registry in [*(r["dataclass_registry"] for r in REGISTRIES.values()), TASK_DATACLASS_REGISTRY]:
        configs += registry.values()
    for config in (FairseqConfig, *filter(is_dataclass, configs)):
        yield from (field.name for field in fields(config))
