"""Log BLEU in each validation with ``--eval-bleu``."""

from typing import Any

import numpy as np
from fairseq import metrics
from fairseq.tasks.translation import EVAL_BLEU_ORDER
from sacrebleu.metrics import BLEU

from surface_fusion.compat.patching import Original, repair


@repair("fairseq.tasks.translation.TranslationTask.reduce_metrics", probe="empty_hypotheses_have_no_bleu")
def count_empty_hypotheses(
    reduce_metrics: Original, task: Any, logging_outputs: list[dict[str, Any]], criterion: Any
) -> None:
    """Log BLEU with ``--eval-bleu`` if all hypotheses are empty, too."""
    reduce_metrics(task, logging_outputs, criterion)
    validated = [log for log in logging_outputs if "_bleu_ref_len" in log]  # none in training
    if not validated or any(log[f"_bleu_totals_{i}"] for log in validated for i in range(EVAL_BLEU_ORDER)):
        return
    for name in ("_bleu_counts", "_bleu_totals"):
        metrics.log_scalar(name, np.zeros(EVAL_BLEU_ORDER))
    metrics.log_scalar("_bleu_sys_len", 0)
    metrics.log_scalar("_bleu_ref_len", sum(float(log["_bleu_ref_len"]) for log in validated))
    metrics.log_derived("bleu", _bleu)


def _bleu(meters: Any) -> float:
    """BLEU of all batches; fairseq keeps the function of the batch that was logged first."""
    counts, totals, sys_len, ref_len = (
        meters[f"_bleu_{name}"].sum for name in ("counts", "totals", "sys_len", "ref_len")
    )
    score = BLEU.compute_bleu(counts, totals, int(sys_len), int(ref_len), smooth_method="exp").score
    return round(float(score), 2)
