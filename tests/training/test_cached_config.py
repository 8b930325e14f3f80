"""Settings are looked up once; the configuration otherwise behaves as omegaconf's."""

from collections.abc import Callable
from typing import Any

import pytest
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import DictConfig, OmegaConf

from surface_fusion.training.cached_config import CachedConfig, cache_lookups


@pytest.fixture
def cfg() -> DictConfig:
    return OmegaConf.create(OmegaConf.structured(FairseqConfig()))


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that omegaconf looks up."""
    names: list[str] = []
    original = DictConfig.__getattr__
    monkeypatch.setattr(DictConfig, "__getattr__", lambda self, key: names.append(key) or original(self, key))
    return names


def test_a_setting_is_looked_up_once_and_again_after_it_was_set(cfg: DictConfig, lookups: list[str]) -> None:
    cache_lookups(cfg)
    lookups.clear()
    assert [cfg.common.seed for _ in range(3)] == [1, 1, 1]
    assert lookups == ["common", "seed"]
    cfg.common.seed = 7
    assert cfg.common.seed == 7
    cfg.common["seed"] = 8
    assert cfg.common.seed == 8


@pytest.mark.parametrize(
    "remove",
    [
        lambda cfg: delattr(cfg, "a"),
        lambda cfg: cfg.__delitem__("a"),
        lambda cfg: cfg.pop("a"),
        lambda cfg: cfg.popitem(),
        lambda cfg: cfg.clear(),
    ],
    ids=["delattr", "del", "pop", "popitem", "clear"],
)
def test_a_removed_value_is_not_cached(remove: Callable[[Any], Any]) -> None:
    cfg: Any = CachedConfig({"a": 1})
    assert cfg.a == 1
    remove(cfg)
    assert "a" not in cfg
    with pytest.raises(AttributeError):
        _ = cfg.a
    assert CachedConfig({}).pop("a", 3) == 3


def test_an_interpolation_follows_the_value_that_it_names() -> None:
    root = OmegaConf.create({"task": {"impl": "${dataset.impl}"}, "dataset": {"impl": "mmap"}})
    cache_lookups(root.task)
    assert root.task.impl == "mmap"
    root.dataset.impl = "raw"
    assert root.task.impl == "raw"


def test_a_cached_configuration_behaves_as_omegaconfs(cfg: DictConfig) -> None:
    before = OmegaConf.to_container(cfg)
    cache_lookups(cfg)
    _ = cfg.common.seed, cfg.dataset.max_tokens, cfg.optimization.lr
    assert OmegaConf.is_config(cfg) and isinstance(cfg.common, CachedConfig)
    assert OmegaConf.to_container(cfg) == before
    with pytest.raises(AttributeError):
        _ = cfg.common.sed


@pytest.mark.parametrize("value", [None, {"a": 1}, object()])
def test_other_types_are_not_wrapped(value: object) -> None:
    cache_lookups(value)
    assert type(value) is not CachedConfig
