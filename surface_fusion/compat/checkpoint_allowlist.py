"""Allow-list of models, tasks and components that a checkpoint's configuration may select.

torch's safe unpickler keeps code out of a checkpoint's objects. fairseq then builds what the configuration
selects: any registered model, task, criterion, tokenizer or subword model, with any option. Some of these run
commands, load further files with other loaders, or fetch URLs. ``--trust-checkpoint`` or
``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`` turns the allow-list off. Strings are parsed as literals in any case.

Models and tasks that are registered outside of fairseq (by this package or the user's ``--user-dir``) are
allowed. So are the values that the user gives for a field on the command line, also in
``--model-overrides``. Resuming a training builds nothing from the checkpoint and is not restricted.
"""

import os
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, ListConfig, OmegaConf

from surface_fusion.compat.checkpoint_loading import TRUST_ADVICE, TRUST_VARIABLE
from surface_fusion.compat.patching import Original, arguments, repair, replaced
from surface_fusion.compat.safe_eval import NotLiteralError, literal
from surface_fusion.errors import SurfaceFusionError, shorten

MODELS = ("transformer", "transformer_align", "transformer_lm")
TASKS = ("translation", "language_modeling")
TOKENIZERS = ("moses", "space")

ALLOWED = {
    "model": MODELS,  # with all their architectures
    "task": TASKS,
    "criterion": (
        "adaptive_loss",
        "cross_entropy",
        "label_smoothed_cross_entropy",
        "label_smoothed_cross_entropy_with_alignment",
        "label_smoothed_cross_entropy_with_rdrop",
    ),
    # gpt2, bert and hf_byte_bpe download files.
    "bpe": ("byte_bpe", "bytes", "characters", "fastbpe", "sentencepiece", "subword_nmt"),
    "tokenizer": TOKENIZERS,
}
"""Names of fairseq that a file may select."""

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
"""String fields that fairseq evaluates, in the models, criteria and optimizers that a file may select."""

_with_task: ContextVar[bool | None] = ContextVar("_with_task", default=None)
"""Whether fairseq builds the task from the checkpoint, too, while it builds a model; None at other times."""


def trusted() -> bool:
    """Whether torch's switch for full unpickling is on, read as torch reads it."""
    return os.environ.get(TRUST_VARIABLE, "0").lower() in ("1", "y", "yes", "true")


def check_configuration(
    state: dict[str, Any], path: str, overrides: dict[str, Any] | None = None, with_task: bool = True
) -> None:
    """Check the configuration of the loaded checkpoint *state* against the allow-list.

    Args:
        state: what ``load_checkpoint_to_cpu`` returned.
        path: of the checkpoint, for the message.
        overrides: fields of the configuration and the values that the user gave for them; these are allowed.
        with_task: whether its task, criterion, tokenizer and subword model are used, too.

    Raises:
        SurfaceFusionError: *state* has :func:`refusals` and the user does not trust the file.
    """
    if trusted():
        return
    cfg, given = _as_dict(state.get("cfg")), overrides or {}
    for refusal in _refused_names(cfg, given, with_task):
        raise _not_trusted(path, refusal)
    for refusal in _refused_code(cfg, given):
        raise SurfaceFusionError(
            f"checkpoint {path} {refusal}, which is never evaluated; do not use the file, or give a value "
            "for that field with --model-overrides"
        )


def refusals(state: dict[str, Any]) -> list[str]:
    """All that :func:`check_configuration` refuses in *state*, as ``names the model fconv``."""
    cfg = _as_dict(state.get("cfg"))
    return [*_refused_names(cfg, {}, with_task=True), *_refused_code(cfg, {})]


def _refused_names(cfg: dict[str, Any], given: dict[str, Any], with_task: bool) -> Iterator[str]:
    for kind, name, registered in _selected(cfg, with_task):
        of_fairseq = registered is None or registered.__module__.split(".")[0] == "fairseq"
        keys = (kind, "arch", "_name") if kind == "model" else (kind, "_name")
        family = ARCH_MODEL_NAME_REGISTRY.get(name, name) if kind == "model" else name
        if of_fairseq and family not in ALLOWED[kind] and not _gave(given, name, *keys):
            yield f"names the {kind} {name}"
    if not with_task:
        return
    task = _as_dict(cfg.get("task"))
    bleu = {"eval_bleu_detok": TOKENIZERS} if task.get("eval_bleu") else {}
    for key, allowed in {"dataset_impl": DATA_FORMATS, **bleu}.items():
        value = task.get(key)
        if value is not None and str(value) not in allowed and not _gave(given, str(value), key):
            yield f"names the {key} {value}"
    plasma = task.get("use_plasma_view")
    if plasma and not _gave(given, plasma, "use_plasma_view"):
        yield "names the server of use_plasma_view"
    for kind in ("bpe", "tokenizer"):  # fairseq downloads their files
        for key, value in _all_items(kind, cfg.get(kind)):
            if isinstance(value, str) and "://" in value and not _gave(given, value, key):
                yield f"names a URL for {key}: {value}"


def _selected(cfg: dict[str, Any], with_task: bool) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and registered class of all that *cfg* selects, found as fairseq finds them."""
    model, task = _as_dict(cfg.get("model")), _as_dict(cfg.get("task"))
    name = model.get("_name") or model.get("arch")
    name = str(next(iter(model)) if not name and len(model) == 1 else name)
    yield "model", name, ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)
    if not with_task:
        return
    name = str(task["task"] if isinstance(task.get("task"), str) else task.get("_name"))
    yield "task", name, TASK_REGISTRY.get(name)
    for kind in ("criterion", "bpe", "tokenizer"):
        section = cfg.get(kind)
        key = kind if isinstance(section, Namespace) else "_name"
        choice = section if isinstance(section, str) else _as_dict(section).get(key)
        if choice is not None:
            yield kind, str(choice), REGISTRIES[kind]["registry"].get(str(choice))


def _refused_code(cfg: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    for key, value in _all_items("cfg", cfg):
        if key in EVALUATED and isinstance(value, str) and not _gave(given, value, key):
            try:
                literal(value)
            except NotLiteralError as error:
                yield f"holds code in {key}: {error.shown} ({error.reason})"


def _gave(given: dict[str, Any], value: Any, *keys: str) -> bool:
    """Whether the user gave *value* for one of *keys*."""
    return any(key in given and given[key] == value for key in keys)


def _as_dict(config: Any) -> dict[str, Any]:
    """The fields of a configuration, Namespace or dataclass, unresolved; empty for any other type."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=False)
    if isinstance(config, Namespace) or (is_dataclass(config) and not isinstance(config, type)):
        config = vars(config)
    return config if isinstance(config, dict) else {}


def _all_items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of the leaves of *value*, at any depth; items of a list have the key of the list."""
    if isinstance(value, ListConfig):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _all_items(key, item)
    elif fields := _as_dict(value):
        for name, field in fields.items():
            yield from _all_items(str(name), field)
    else:
        yield key, value


_loading = threading.RLock()
"""Held while ``torch.load`` is replaced."""


@repair("fairseq.checkpoint_utils.load_checkpoint_to_cpu", probe="checkpoint_reads_environment")
def refuse_interpolations(load: Original, path: str, *args: Any, **kwargs: Any) -> Any:
    """Refuse interpolations in a checkpoint before anything resolves them.

    ``${oc.env:HOME}`` reads the environment, others call the user's resolvers. The configurations that
    fairseq stores are resolved and contain none. Non-string values are checked too: fairseq may convert them
    to strings.
    """
    if trusted():
        return load(path, *args, **kwargs)
    load_file = torch.load

    def load_checked(*args: Any, **kwargs: Any) -> Any:
        state = load_file(*args, **kwargs)
        for key, value in _all_items("", state):
            if "${" in key or (not isinstance(value, torch.Tensor) and "${" in str(value)):
                raise _not_trusted(path, f"holds the interpolation {key}={value}")
        return state

    with _loading, replaced(torch, "load", load_checked):
        return load(path, *args, **kwargs)


@repair("fairseq.checkpoint_utils.load_checkpoint_to_cpu", probe="checkpoint_names_any_model")
def load_allowed(load: Original, path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Check what a checkpoint selects before a model is built: some names run commands or fetch URLs."""
    state = load(path, arg_overrides, *args, **kwargs)
    if (with_task := _with_task.get()) is not None:
        check_configuration(state, path, arg_overrides, with_task)
    return state


@repair("fairseq.checkpoint_utils.load_model_ensemble_and_task", probe="checkpoint_names_any_model")
def build_allowed(build: Original, *args: Any, **kwargs: Any) -> Any:
    """Check what each checkpoint of an ensemble selects, also of one that the caller has loaded."""
    given = arguments(build, *args, **kwargs)
    with_task = given["task"] is None
    if given["state"] is not None:
        check_configuration(given["state"], given["filenames"][0], given["arg_overrides"], with_task)
    token = _with_task.set(with_task)
    try:
        return build(*args, **kwargs)
    finally:
        _with_task.reset(token)


@repair("fairseq.utils.parse_embedding", probe="trained_model_reads_embeddings")
def skip_initial_embeddings(parse_embedding: Original, embed_path: str) -> Any:
    """Skip the file of ``--encoder-embed-path`` when a trained model is loaded: it may be gone or endless."""
    return {} if _with_task.get() is not None else parse_embedding(embed_path)


def _not_trusted(path: str, refusal: str) -> SurfaceFusionError:
    shown = shorten(" ".join(refusal.split()), 300)
    return SurfaceFusionError(
        f"checkpoint {path} {shown}, which is not on the list of what a file may name{TRUST_ADVICE}"
    )
