"""Tasks and hubs are copied."""

import copy

import pytest
import torch
from fairseq import hub_utils
from omegaconf import OmegaConf

from tests.helpers.tiny import build


def test_a_copied_hub_has_its_own_task_state() -> None:
    model, task = build("--surfacefusion", "att", "--sf-gate", "0.8")
    cfg = {"generation": {"replace_unk": None}, "tokenizer": None, "bpe": None}
    hub = hub_utils.GeneratorHubInterface(OmegaConf.create(cfg), task, [model])
    task.state.add_factory("answer", int)
    copied = copy.deepcopy(hub)
    assert copied.task.state.answer == 0 and "answer" not in task.state.state_dict
    with pytest.raises(AttributeError, match="no factory for attribute question"):
        _ = copied.task.state.question
    assert copied.models[0] is not model
    same = zip(model.parameters(), copied.models[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
