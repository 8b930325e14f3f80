"""Faults that let a file run code, read the environment or write elsewhere."""

import argparse
import ast
import contextlib
import inspect
import os
import pkgutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from fairseq import checkpoint_utils, file_utils, models, utils
from fairseq.data import Dictionary, FastaDataset
from fairseq.data.audio.data_cfg import get_config_from_yaml
from fairseq.models.transformer import TransformerModelBase
from omegaconf import OmegaConf

from tests.compat.probes.checkpoints import checkpoint


@contextlib.contextmanager
def _marker() -> Iterator[tuple[Path, str]]:
    """A path, and code that creates a file there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "marker")
        yield path, f"__import__('pathlib').Path({str(path)!r}).touch()"


def text_is_evaluated(owner: str) -> bool:
    """By the code of *owner*, which calls ``eval``; ``fairseq.utils`` is called."""
    module = pkgutil.resolve_name(owner)
    if module is not utils:
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        return any(isinstance(node, ast.Call) and ast.unparse(node.func) == "eval" for node in nodes)
    with _marker() as (path, code):
        with contextlib.suppress(Exception):
            utils.eval_str_list(f"[{code}]")
        return path.exists()


def checkpoint_reads_environment() -> bool:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(checkpoint(cfg={"note": "${oc.env:PATH}"}), file.name)
        return checkpoint_utils.load_checkpoint_to_cpu(file.name)["cfg"].note == os.environ["PATH"]


def checkpoint_names_any_model() -> bool:
    """``fconv``, which then evaluates its layers."""
    words = Dictionary()
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    task.build_model = lambda cfg: models.build_model(cfg, task)
    with _marker() as (path, code):
        model = {"_name": "fconv", "dropout": 0.1, "max_source_positions": 8, "encoder_layers": code}
        state = {"cfg": OmegaConf.create({"model": model}), "model": {}}
        with contextlib.suppress(Exception):
            checkpoint_utils.load_model_ensemble_and_task([__file__], task=task, state=state)
        return path.exists()


def trained_model_reads_embeddings() -> bool:
    """By its code: only ``FairseqTask.build_model`` knows that the model is loaded from a checkpoint."""
    builds = inspect.signature(TransformerModelBase.build_embedding).parameters
    code = inspect.getsource(TransformerModelBase.build_embedding)
    return "from_checkpoint" not in builds and "parse_embedding(path)" in code


def fasta_name_reaches_shell() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Exception):
            FastaDataset(f"{folder}/train;touch {folder}/marker;")
        return Path(folder, "marker").exists()


def yaml_names_code() -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("a: !!python/name:os.system\n")
        file.flush()
        return get_config_from_yaml(Path(file.name))["a"] is os.system


def archive_writes_anywhere() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.tar.gz")
        with tarfile.open(path, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("model/dict.txt"))
            archive.addfile(tarfile.TarInfo(f"{folder}/outside"))
        with contextlib.suppress(Exception):
            file_utils.load_archive_file(str(path))
        return Path(folder, "outside").exists()
