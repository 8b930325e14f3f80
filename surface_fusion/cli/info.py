"""``surface-fusion info``: describe a checkpoint, or print the versions for a bug report."""

import contextlib
import copy
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf, open_dict

from surface_fusion.cli.checkpoint_flags import add_checkpoint_flags, import_user_dir, trusted_checkpoints
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.cli.verbs import SUMMARIES
from surface_fusion.compat.checkpoint_allowlist import refusals
from surface_fusion.compat.checkpoint_integrity import NotFiniteError, not_finite
from surface_fusion.compat.checkpoint_loading import TRUST_ADVICE
from surface_fusion.config.flags import SurfaceFusionConfig
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.transformer_surface_fusion import MODEL_NAME
from surface_fusion.models.upgrade_state_dict import ENCODER_FUSION_PARAMETERS, FUSION_PARAMETERS
from surface_fusion.version import __version__

LOSSES_IN_BITS = ("loss", "nll_loss", "normalized_nll_loss")  # fairseq logs them in base 2
# Entries of a state dict that are not parameters.
BUFFERS = ("version", "_float_tensor", "fusion.positions", "ffn_norm_first")


def run(argv: Sequence[str]) -> None:
    """Print a description of a checkpoint, or the versions."""
    parser = OneLineParser("info", "[CHECKPOINT] [--json]", description=SUMMARIES["info"])
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_checkpoint_flags(parser)
    args = parser.parse_args(argv)
    import_user_dir(args.user_dir)
    path, trust = args.checkpoint, args.trust_checkpoint
    facts = versions() if path is None else checkpoint_facts(path, trust)
    if args.json:
        print(json.dumps(facts))
        return
    if files := facts.get("averaged"):
        names = ", ".join(files)
        facts["averaged"] = f"of {len(files)} files, {names}; updates and best loss are those of the last"
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<{width}}  {_formatted(value)}")


def _formatted(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def versions() -> dict[str, Any]:
    """Return the versions of the packages, and the devices, for a bug report."""
    names = dict.fromkeys(metadata.packages_distributions().get("fairseq", ()))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "surface_fusion": __version__,
        "fairseq": ", ".join(f"{name} {metadata.version(name)}" for name in names)
        or "not installed as a distribution",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": ", ".join(devices) or "CPU only",
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def checkpoint_facts(path: str, trust: bool) -> dict[str, Any]:
    """Describe the checkpoint *path*.

    ``safe_to_load`` is true if every verb loads it without ``--trust-checkpoint``; otherwise
    ``unsafe_because`` lists the reasons.

    Raises:
        SurfaceFusionError: it cannot be loaded, or only with *trust*.
    """
    unsafe_because = []
    try:
        state = _load(path)
    except SurfaceFusionError as error:
        if not trust:
            raise
        unsafe_because.append(str(error).removesuffix(TRUST_ADVICE))
        with trusted_checkpoints(trust):
            state = _load(path)
    unsafe_because += [f"it {refusal}" for refusal in refusals(state)]
    model, cfg = state["model"], state["cfg"].model
    last = state["optimizer_history"][-1]
    best = state["extra_state"].get("best")
    tensors = {name: value for name, value in model.items() if not name.endswith(BUFFERS)}
    fusion = {n: v for n, v in tensors.items() if n.startswith(FUSION_PARAMETERS + ENCODER_FUSION_PARAMETERS)}
    embeddings = {stack: model.get(f"{stack}.embed_tokens.weight") for stack in ("encoder", "decoder")}
    entries = {stack: None if weight is None else len(weight) for stack, weight in embeddings.items()}
    return {
        "checkpoint": path,
        "architecture": _architecture(cfg),
        "fusion": describe_fusion(cfg),
        "parameters": _count(tensors),
        "fusion_parameters": _count(fusion),
        "averaged": state.get("averaged", False),
        "updates": last["num_updates"],
        "best_loss": best,
        "best_loss_is": None if best is None else _metric(state["cfg"]),
        "languages": _languages(state["cfg"].task),
        "source_dictionary": entries["encoder"],
        "target_dictionary": entries["decoder"],
        "not_finite": not_finite(state),
        "published_code": hasattr(state.get("args"), "sf_fuision_mode"),
        "safe_to_load": not unsafe_because,
        **({"unsafe_because": "; ".join(unsafe_because)} if unsafe_because else {}),
    }


def _load(path: str) -> Any:
    try:
        return checkpoint_utils.load_checkpoint_to_cpu(path)
    except NotFiniteError as error:
        return error.state


def _metric(cfg: Any) -> str:
    """Describe the metric of the best loss: ``--best-checkpoint-metric`` on the validation set."""
    name = cfg.checkpoint.best_checkpoint_metric
    if name not in LOSSES_IN_BITS:
        return f"validation {name}"
    unit = "sentence" if name == "loss" and cfg.optimization.sentence_avg else "token"
    smoothed = name == "loss" and (getattr(cfg.criterion, "label_smoothing", None) or 0) > 0
    flags = _complete(cfg.model)
    unnormalised = flags is not None and flags.unnormalised and name != "normalized_nll_loss"
    smoothing = ", with label smoothing" if smoothed else ""
    hard_fusion = ", of hard fusion's probabilities, which sum to less than 1" if unnormalised else ""
    return f"validation {name}, bits per {unit}{smoothing}{hard_fusion}"


def _languages(task: Any) -> str:
    """Return the language pair: that of the flags, otherwise inferred from the data folder as in fairseq."""
    source, target = task.get("source_lang"), task.get("target_lang")
    folders = utils.split_paths(task.get("data") or "")
    if source is None and folders and os.path.isdir(folders[0]):
        source, target = data_utils.infer_language_pair(folders[0])
    if source is None:
        return "not recorded: trained without -s and -t, and its data folder does not exist"
    return f"{source}-{target}"


def _count(tensors: dict[str, torch.Tensor]) -> int:
    """Count the values in *tensors*; tensors that share memory count once."""
    return sum({(t.data_ptr(), t.shape): t.numel() for t in tensors.values()}.values())


def _architecture(model_cfg: Any) -> str:
    return str(getattr(model_cfg, "arch", None) or model_cfg._name)


def _complete(model_cfg: Any) -> SurfaceFusionConfig | None:
    """Fill in the defaults of *model_cfg*; None if it is not of a SurfaceFusion model."""
    architecture = _architecture(model_cfg)
    if not architecture.startswith(MODEL_NAME):
        return None
    args = copy.deepcopy(model_cfg)
    with open_dict(args) if OmegaConf.is_config(args) else contextlib.nullcontext():
        ARCH_CONFIG_REGISTRY[architecture](args)  # as fairseq does before it builds the model
    return SurfaceFusionConfig.from_namespace(args)


def describe_fusion(model_cfg: Any) -> str:
    """Describe the fusion that the flags of *model_cfg* (a Namespace or YAML configuration) select."""
    cfg = _complete(model_cfg)
    if cfg is None:
        return "none: not a model of surface-fusion"
    embedding = " with the embedding layer" if cfg.encoder_fusion_embedding else ""
    parts: list[Any] = [
        not (cfg.surfacefusion or cfg.encoder_fusion) and "none: a plain Transformer",
        cfg.layer_wise_attention and "decoder layer i attends to encoder layer i",
        cfg.encoder_fusion and f"encoder layers fused by {cfg.encoder_fusion}{embedding}",
    ]
    if cfg.surfacefusion is not None:
        parts += [
            _describe_surface(cfg),
            f"{'without' if cfg.sf_no_posedemb else 'with'} positions",
            _describe_mode(cfg),
            f"{'shared' if cfg.sf_ffn else 'no'} feed-forward layer",
            cfg.sf_linear and "linear map per branch",
            cfg.sf_no_detach and "gradient into query and key",
        ]
    return "; ".join(filter(None, parts))


def _describe_surface(cfg: SurfaceFusionConfig) -> str:
    if cfg.surfacefusion != "att":
        pooled = "tokens with id >= 50" if cfg.sf_pool_published else "all tokens"
        return f"{cfg.surfacefusion} of the source embeddings over {pooled}"
    depth = range(cfg.decoder.layers)[-1 if cfg.sf_idx is None else cfg.sf_idx] + 1
    heads = f"{cfg.sf_attention_heads} head{'s' if cfg.sf_attention_heads > 1 else ''}"
    return f"attention ({heads}) from decoder layer {depth} of {cfg.decoder.layers} to the source embeddings"


def _describe_mode(cfg: SurfaceFusionConfig) -> str:
    if not cfg.mode.gated:
        return f"{cfg.sf_mode}, tau {cfg.mode.scale(cfg.sf_softmax_tau):g}"
    gate = "learned gate" if cfg.learned_gate else f"gate {cfg.sf_gate:g}"
    return f"{cfg.sf_mode}, {gate}{', renormalised' if cfg.sf_renormalize else ''}"
