"""With the plugin imported, fairseq's other tasks and models train as without it, bit for bit."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fairseq.tasks import TASK_REGISTRY

from tests.helpers import warm_processes
from tests.helpers.other_tasks import CASES
from tests.helpers.small_training import TEXT

SCRIPT = "tests.helpers.other_tasks:main"

BROKEN = {
    "translation_lev insertion": "scatter() of two dtypes",
    "translation_lev nacrf": "np.float, which numpy no longer has",
    "translation_from_pretrained_bart": "self.args, which the task no longer has",
    "semisupervised_translation": "KeyError: loss",
    "legacy_masked_lm": "its dictionary does not take add_special_symbols",
    "cross_lingual_lm": "its dictionary does not take add_special_symbols",
    "multilingual_language_modeling": "asserts that a language is resampled to less than its size",
    "sentence_prediction_adapters": "needs layers with adapters, which no architecture of fairseq has",
}
"""Cases that plain fairseq cannot train on today's Python, torch and numpy."""

NOT_DETERMINISTIC = ("translation lightconv", "language_modeling lightconv_lm")
"""Two runs of plain fairseq end in parameters that differ in the last bits; only the losses are compared."""

AUDIO = "reads audio files by soundfile, which is not installed"
NOT_RUN = {
    **dict.fromkeys(("audio_pretraining", "audio_finetuning", "audio_classification"), AUDIO),
    **dict.fromkeys(("hubert_pretraining", "multires_hubert_pretraining", "nlu_finetuning"), AUDIO),
    **dict.fromkeys(("text_to_speech", "frm_text_to_speech"), "wants spectrograms of speech and phonemes"),
    **dict.fromkeys(("speech_to_speech", "speech_unit_modeling", "speech_dlm_task"), "wants units of speech"),
    "translation_from_pretrained_xlm": "wants a trained XLM model",
    **dict.fromkeys(("simul_speech_to_text", "simul_text_to_text"), "has no model but in fairseq's examples"),
}
"""Registered tasks that no case trains, each with the reason."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases without and with the plugin, in two processes at a time."""
    folder = tmp_path_factory.mktemp("tasks")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # processes that fork cannot use a GPU

    def run(what: str, *more: object) -> str:
        (folder / what).mkdir()  # also for the crash.pt of BROKEN
        done = warm_processes.run(SCRIPT, what, folder, *more, env=environment, cwd=folder / what)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("data", TEXT)
    with ThreadPoolExecutor() as pool:
        plain, plugin = (json.loads(text.splitlines()[-1]) for text in pool.map(run, ("plain", "plugin")))
    return {"plain": plain, "plugin": plugin}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_training_with_the_plugin_equals_one_without(results: dict[str, dict[str, Any]], case: str) -> None:
    plain, plugin = results["plain"][case], results["plugin"][case]
    if case in BROKEN:
        assert "error" in plain, f"fairseq trains {case} now: take it out of BROKEN"
        assert plugin["error"] == plain["error"]
    else:
        assert "error" not in plain, plain["error"] + plain["trace"]
        assert "error" not in plugin, plugin["error"] + plugin["trace"]
        assert len(plain["losses"]) == 2
        assert plugin["losses"] == plain["losses"]
        assert plugin["state"] == plain["state"] or case in NOT_DETERMINISTIC


def test_every_task_is_trained_or_listed_with_a_reason() -> None:
    trained = {flags[flags.index("--task") + 1] for _, flags in CASES.values()}
    fairseqs = {name for name, task in TASK_REGISTRY.items() if task.__module__.startswith("fairseq.")}
    assert trained | set(NOT_RUN) == fairseqs
    assert not trained & set(NOT_RUN)
