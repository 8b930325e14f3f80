"""Check the settings of validation before training: ``--eval-bleu-args`` and ``--best-checkpoint-metric``.

fairseq reads the former after it has built the model, and looks the metric up after the first validation.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fairseq.dataclass.configs import GenerationConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.translation import TranslationTask

from surface_fusion.errors import SurfaceFusionError, unknown_setting

CRITERIONS = ("cross_entropy", "label_smoothed_cross_entropy", "fused_label_smoothed_cross_entropy")


def check_names_of_generation(names: Iterable[str], place: str = "", further: Iterable[str] = ()) -> None:
    """Check that *names*, given in *place*, are fields of fairseq's ``GenerationConfig``, or *further* ones.

    Raises:
        SurfaceFusionError: one is not.
    """
    known = {field.name for field in fields(GenerationConfig)}.union(further)
    for name in names:
        if name not in known:
            raise unknown_setting(f"{name}{place} is not a generation setting", name, known)


def eval_bleu_args(task: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the ``--eval-bleu-args`` of a *task*'s settings; empty without ``--eval-bleu``.

    Raises:
        SurfaceFusionError: a value is not a JSON object, or a setting or tokenizer is unknown.
    """
    if not task.get("eval_bleu"):
        return {}
    given = _parse("--eval-bleu-args", task.get("eval_bleu_args"))
    check_names_of_generation(given, " in --eval-bleu-args")
    _parse("--eval-bleu-detok-args", task.get("eval_bleu_detok_args"))
    tokenizer, tokenizers = task.get("eval_bleu_detok"), REGISTRIES["tokenizer"]["registry"]
    if tokenizer not in tokenizers:
        known = ", ".join(sorted(tokenizers))
        raise SurfaceFusionError(f"--eval-bleu-detok {tokenizer}: choose one of {known}")
    return given


def _parse(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise SurfaceFusionError(f"{flag} {text} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SurfaceFusionError(f'{flag} {text} is not a JSON object; write it as in {{"beam": 4}}')
    return value


def check_best_metric(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Check ``--best-checkpoint-metric`` in fairseq's configuration: its direction, and that it is logged.

    Raises:
        SurfaceFusionError: validation does not log the metric, or the worst value would be the best.
    """
    settings = sections["checkpoint"]
    metric, highest = settings.get("best_checkpoint_metric"), settings.get("maximize_best_checkpoint_metric")
    logged = _logged_metrics(sections)
    if logged and metric not in logged:
        advice = "add --eval-bleu" if metric == "bleu" else f"choose one of {', '.join(logged)}"
        raise SurfaceFusionError(f"--best-checkpoint-metric {metric} is not logged by validation; {advice}")
    if metric in ("bleu", "accuracy") and not highest:
        raise SurfaceFusionError(
            f"--best-checkpoint-metric {metric} would keep the checkpoint with the lowest {metric}; add "
            "--maximize-best-checkpoint-metric"
        )


def _logged_metrics(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The metrics that validation logs; none if unknown: the task's or a criterion not in ``CRITERIONS``."""
    task, criterion = sections.get("task", {}), sections.get("criterion", {})
    reduce = getattr(TASK_REGISTRY.get(task.get("_name", "")), "reduce_metrics", None)
    if reduce not in (FairseqTask.reduce_metrics, TranslationTask.reduce_metrics):
        return []
    if criterion.get("_name") not in CRITERIONS or sections["dataset"].get("disable_validation"):
        return []
    logged = ["loss", "nll_loss", "ppl"]
    if criterion.get("report_accuracy"):
        logged += ["accuracy", "total", "n_correct"]
    if criterion["_name"] == "fused_label_smoothed_cross_entropy":  # with --sf-mode hard
        logged += ["normalized_nll_loss", "normalized_ppl"]
    return [*logged, "bleu"] if task.get("eval_bleu") else logged
