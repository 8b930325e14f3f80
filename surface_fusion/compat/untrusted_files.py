"""What the configuration stored in a checkpoint may name when a model and a task are built from it.

torch's safe unpickler keeps code out of a checkpoint's objects. fairseq then builds what the configuration
names: any registered model, task, criterion, tokenizer or subword model, with any option. Some of these run
commands, load further files with other loaders, or fetch URLs. ``--trust-checkpoint``, or
``TRUST_VARIABLE=1``, lifts these limits, but not that texts are parsed as literals.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, ListConfig, OmegaConf

from surface_fusion.compat.checkpoint_loading import TRUST_VARIABLE
from surface_fusion.compat.literals import NoLiteralError, literal
from surface_fusion.compat.patching import wrap
from surface_fusion.errors import SurfaceFusionError

MODELS = ("transformer", "transformer_align", "transformer_lm")
"""fairseq's models that a file may name, with all their architectures."""

TASKS = ("translation", "language_modeling")
CRITERIA = (
    "adaptive_loss",
    "cross_entropy",
    "label_smoothed_cross_entropy",
    "label_smoothed_cross_entropy_with_alignment",
    "label_smoothed_cross_entropy_with_rdrop",
)
SUBWORDS = ("byte_bpe", "bytes", "characters", "fastbpe", "sentencepiece", "subword_nmt")
"""Those that fetch nothing from the network: not gpt2, bert and hf_byte_bpe."""
TOKENIZERS = ("moses", "space")
DATA_FORMATS = ("cached", "huffman", "lazy", "mmap", "raw")
"""All but fasta."""

EVALUATED = (
    "adafactor_eps",
    "adam_betas",
    "adamax_betas",
    "adaptive_input_cutoff",
    "adaptive_softmax_cutoff",
    "character_filters",
    "decoder_xformers_att_config",
    "encoder_xformers_att_config",
    "lamb_betas",
    "wer_args",
    "xformers_att_config",
)
"""Fields of which fairseq evaluates texts, in the models, criteria and optimizers that a file may name."""

_building: ContextVar[str | None] = ContextVar("_building", default=None)
"""``model`` while fairseq builds one from files, ``task`` while it builds a task as well."""


def restrict_untrusted_files() -> None:
    """Refuse a checkpoint by name whose configuration names more than this module allows.

    Models and tasks that code outside of fairseq registered (this package, the user's ``--user-dir``) are the
    user's choice and allowed. So is all that the command line names, also by ``--model-overrides``. A resumed
    training builds nothing from its checkpoint and is not limited.
    """
    wrap(checkpoint_utils, "overwrite_args_by_name", _overwrite)
    wrap(checkpoint_utils, "_upgrade_state_dict", _upgrade)
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load)
    wrap(checkpoint_utils, "load_model_ensemble_and_task", _build)


def trusted() -> bool:
    """Whether torch's switch for full unpickling is on, read as torch reads it."""
    return os.environ.get(TRUST_VARIABLE, "0").lower() in ("1", "y", "yes", "true")


def check_configuration(
    state: dict[str, Any], path: str, overrides: dict[str, Any] | None = None, with_task: bool = True
) -> None:
    """Raise if the configuration of the loaded checkpoint *state* names what a file may not.

    Args:
        state: what ``load_checkpoint_to_cpu`` returned.
        path: of the checkpoint, for the message.
        overrides: what the user gave for fields of the configuration; allowed.
        with_task: whether its task, criterion, tokenizer and subword model are used, too.

    Raises:
        SurfaceFusionError: with the first of :func:`refusals`, unless the user trusts the file.
    """
    if trusted():
        return
    cfg, given = _fields(state.get("cfg")), _texts(overrides)
    for refusal in _names(cfg, given, with_task):
        raise _not_trusted(path, refusal)
    for refusal in _code(cfg, given):
        raise SurfaceFusionError(
            f"checkpoint {path} {refusal}, which is never evaluated; do not use the file, or give a value "
            "for that field with --model-overrides"
        )


def refusals(state: dict[str, Any]) -> list[str]:
    """All that :func:`check_configuration` refuses in *state*, as ``names the model fconv``."""
    cfg = _fields(state.get("cfg"))
    return [*_names(cfg, set(), with_task=True), *_code(cfg, set())]


def _names(cfg: dict[str, Any], given: set[str], with_task: bool) -> Iterator[str]:
    yield from _model_refusals(_fields(cfg.get("model")), given)
    if with_task:
        yield from _task_refusals(_fields(cfg.get("task")), given)
        yield from _registry_refusals("criterion", cfg.get("criterion"), CRITERIA, given)
        yield from _registry_refusals("bpe", cfg.get("bpe"), SUBWORDS, given)
        yield from _registry_refusals("tokenizer", cfg.get("tokenizer"), TOKENIZERS, given)


def _code(cfg: dict[str, Any], given: set[str]) -> Iterator[str]:
    for key, value in _all_items("cfg", cfg):
        if key in EVALUATED and isinstance(value, str) and value not in given:
            try:
                literal(value)
            except NoLiteralError as error:
                yield f"holds code in {key}: {error.shown} ({error.reason})"


def _texts(overrides: dict[str, Any] | None) -> set[str]:
    return {value for value in (overrides or {}).values() if isinstance(value, str)}


def _model_refusals(model: dict[str, Any], given: set[str]) -> Iterator[str]:
    # As fairseq.models.build_model finds the name.
    name = model.get("_name") or model.get("arch")
    if not name and len(model) == 1:
        name = next(iter(model))
    found = _find(ARCH_MODEL_REGISTRY, name) or _find(MODEL_REGISTRY, name)
    family = _find(ARCH_MODEL_NAME_REGISTRY, name) or name
    if family not in MODELS:
        yield from _name_refusal("model", name, found, given)


def _task_refusals(task: dict[str, Any], given: set[str]) -> Iterator[str]:
    # As fairseq.tasks.setup_task finds the name.
    name = task["task"] if isinstance(task.get("task"), str) else task.get("_name")
    if name not in TASKS:
        yield from _name_refusal("task", name, _find(TASK_REGISTRY, name), given)
    limited: dict[str, tuple[str, ...]] = {"dataset_impl": DATA_FORMATS}
    if task.get("eval_bleu"):
        limited["eval_bleu_detok"] = TOKENIZERS
    for key, allowed in limited.items():
        value = task.get(key)
        if value is not None and str(value) not in (*allowed, *given):
            yield f"names the {key} {value}"
    if task.get("use_plasma_view"):
        yield "names the server of use_plasma_view"


def _registry_refusals(kind: str, section: Any, allowed: tuple[str, ...], given: set[str]) -> Iterator[str]:
    # As fairseq.registry.setup_registry finds the name.
    fields = _fields(section)
    name = (
        section
        if isinstance(section, str)
        else fields.get(kind if isinstance(section, Namespace) else "_name")
    )
    if name is not None and name not in allowed:
        yield from _name_refusal(kind, name, _find(REGISTRIES[kind]["registry"], name), given)
    if kind in ("bpe", "tokenizer"):  # whose files fairseq fetches
        for key, value in _all_items(kind, section):
            if isinstance(value, str) and "://" in value and value not in given:
                yield f"names a URL for {key}: {value}"


def _name_refusal(kind: str, name: Any, found: Any, given: set[str]) -> Iterator[str]:
    """Refuse *name* unless it stands for code outside of fairseq, or the user gave it."""
    of_fairseq = found is None or found.__module__.split(".")[0] == "fairseq"
    if of_fairseq and not (isinstance(name, str) and name in given):
        yield f"names the {kind} {name}"


def _find(registry: dict[str, Any], name: Any) -> Any:
    return registry.get(name) if isinstance(name, str) else None


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration, Namespace or dataclass as they are stored; none of anything else."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=False)
    if isinstance(config, Namespace) or (is_dataclass(config) and not isinstance(config, type)):
        config = vars(config)
    return config if isinstance(config, dict) else {}


def _all_items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of *value* at any depth that hold no others; items of lists have their list's key."""
    if isinstance(value, ListConfig):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _all_items(key, item)
    elif fields := _fields(value):
        for name, field in fields.items():
            yield from _all_items(str(name), field)
    else:
        yield key, value


class _Interpolation(SurfaceFusionError):
    """Its text is what the checkpoint does, without the path."""


def _check_interpolations(stored: Any) -> None:
    """Refuse interpolations: ``${oc.env:HOME}`` reads the environment, and others run a user's resolvers.

    The configurations that fairseq stores are resolved and hold none. Whatever is no text, fairseq may turn
    into one.
    """
    if not trusted():
        for key, value in _all_items("", stored):
            if "${" in key or "${" in str(value):
                raise _Interpolation(f"holds the interpolation {key}={value}")


def _overwrite(original: Callable[..., Any], cfg: Any, overrides: Any) -> Any:
    _check_interpolations(cfg)  # reading a field resolves it
    return original(cfg, overrides)


def _upgrade(original: Callable[..., Any], state: Any) -> Any:
    if isinstance(state, dict):
        _check_interpolations([state.get("args"), state.get("cfg")])
    return original(state)


def _load(
    original: Callable[..., Any], path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    try:
        state = original(path, arg_overrides, *args, **kwargs)
    except _Interpolation as refusal:
        raise _not_trusted(path, str(refusal)) from None
    if (building := _building.get()) is not None:
        check_configuration(state, path, arg_overrides, building == "task")
    return state


def _build(
    original: Callable[..., Any],
    filenames: list[str],
    arg_overrides: Any = None,
    task: Any = None,
    strict: bool = True,
    suffix: str = "",
    num_shards: int = 1,
    state: Any = None,
) -> Any:
    if state is not None:
        check_configuration(state, filenames[0], arg_overrides, task is None)
    token = _building.set("task" if task is None else "model")
    try:
        return original(filenames, arg_overrides, task, strict, suffix, num_shards, state)
    finally:
        _building.reset(token)


def _not_trusted(path: str, refusal: str) -> SurfaceFusionError:
    shown = " ".join(refusal.split())
    return SurfaceFusionError(
        f"checkpoint {path} {shown if len(shown) <= 300 else shown[:300] + ' ...'}, which is not on the list "
        "of what a file may name; if you trust the file, load it with --trust-checkpoint (surface-fusion) or "
        f"{TRUST_VARIABLE}=1 (fairseq commands)"
    )
