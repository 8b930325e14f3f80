"""``--num-shards`` and ``--shard-id``: each sentence in one shard."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fairseq.data import data_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from surface_fusion.cli.main import main
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.paths import REFERENCE

DATA = (str(REFERENCE / "data-bin"), "--path", str(REFERENCE / "checkpoint_best.pt"), "--cpu")


def shard(count: int, place: int) -> tuple[str, ...]:
    return ("--num-shards", str(count), "--shard-id", str(place))


@pytest.mark.slow
def test_generate_translates_each_sentence_in_one_shard(capsys: pytest.CaptureFixture[str]) -> None:
    def hypotheses(*flags: str) -> dict[str, str]:
        capsys.readouterr()
        assert main(["generate", *DATA, "--beam", "1", "--num-workers", "0", *flags]) == 0
        return dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", capsys.readouterr().out, re.MULTILINE))

    first, second = (hypotheses(*shard(2, place)) for place in (0, 1))
    assert len(first) == len(second) == 75
    assert first | second == hypotheses()
    (single,) = hypotheses(*shard(150, 149)).items()
    assert single in (first | second).items()


@pytest.mark.slow
def test_validate_reads_each_sentence_in_one_shard(capsys: pytest.CaptureFixture[str]) -> None:
    def loss_and_tokens(*flags: str) -> tuple[float, int]:
        capsys.readouterr()
        wanted = ("--valid-subset", "test", "--max-tokens", "9000")
        assert main(["validate", *DATA, *wanted, "--num-workers", "0", *flags]) == 0
        said = capsys.readouterr().out
        return float(re.findall(r"\| loss (\S+)", said)[-1]), int(re.findall(r"\| wpb (\d+)", said)[-1])

    (a, tokens_a), (b, tokens_b) = (loss_and_tokens(*shard(2, place)) for place in (0, 1))
    whole, tokens = loss_and_tokens()
    assert tokens_a + tokens_b == tokens
    assert (a * tokens_a + b * tokens_b) / tokens == pytest.approx(whole, abs=2e-3)


def config(path: str | None, num_shards: int, shard_id: int) -> Any:
    cfg = OmegaConf.structured(FairseqConfig())
    cfg.distributed_training.distributed_world_size = 1
    cfg.common_eval.path = path
    cfg.dataset.num_shards, cfg.dataset.shard_id = num_shards, shard_id
    return cfg


def batches_in(cfg: Any) -> tuple[list[int], int]:
    """The sentences that a command reads of 10, and how many shards it sees in its configuration."""
    seen: list[Any] = []

    def command(cfg: Any) -> None:
        for indices in (np.arange(10), range(10)):
            batches = data_utils.batch_by_size(indices, lambda i: 5, max_sentences=2)
            seen.append([int(i) for batch in batches for i in batch])
        sizes = np.full(10, 5)
        batches = data_utils.batch_by_size(np.arange(10), lambda i: 5, sizes, max_tokens=10)
        seen.append([int(i) for batch in batches for i in batch])
        seen.append(cfg.dataset.num_shards)

    distributed_utils.call_main(cfg, command)
    assert seen[0] == seen[1] == seen[2]
    return seen[0], seen[3]


def test_shards_are_applied_once_and_not_in_a_training() -> None:
    """``eval-lm`` takes shards itself; a training deals out batches to processes."""
    assert batches_in(config("x.pt", 3, 1)) == ([1, 4, 7], 1)
    assert batches_in(config("x.pt", 1, 0)) == ([*range(10)], 1)
    assert batches_in(config(None, 3, 1)) == ([*range(10)], 3)


@pytest.mark.parametrize("place", [-1, 2])
def test_an_invalid_shard_is_refused(place: int) -> None:
    with pytest.raises(SurfaceFusionError, match=f"--num-shards 2 --shard-id {place}: give --num-shards N"):
        batches_in(config("x.pt", 2, place))


def test_a_shard_without_a_sentence_is_refused() -> None:
    with pytest.raises(SurfaceFusionError, match="the data has 10 sentences, so this shard is empty"):
        batches_in(config("x.pt", 12, 11))


@pytest.mark.slow
def test_interactive_refuses_shards(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the bird\n")
    assert main(["interactive", *DATA, "--input", str(text), *shard(2, 1)]) == 2
    assert "--num-shards 2: interactive translates each line; leave it out" in capsys.readouterr().err
