# ruff: noqa: RUF005 (lists of flags that go over several lines)
"""Run in a process of its own: train each of ``CASES`` for a few updates, without or with the plugin.

``main``, with the arguments ``plain|plugin DATA``, forks for each case. It prints one JSON object: case ->
the losses of all updates and a hash of the parameters and optimizer state, or the error. DATA is what
:func:`make_data` wrote.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which torch.optim imports: once, before the forks

SMALL = ("--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "8", "--dropout", "0.1")
HEADS = ("--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--encoder-ffn-embed-dim", "16")
TRANSFORMER = (*SMALL, *HEADS, "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "16")
ROBERTA = (*SMALL[:2], *SMALL[4:], *HEADS[:2], *HEADS[4:], "--max-positions", "64")
DECODER = ("--decoder-layers", "1", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "16")
DECODER_LM = (*DECODER, "--decoder-attention-heads", "2")
PAIR = ("-s", "en", "-t", "ro")
NAT = (
    *("--task", "translation_lev", "--criterion", "nat_loss", *PAIR, *TRANSFORMER, "--share-all-embeddings"),
    *("--apply-bert-init", "--label-smoothing", "0.1", "--dropout", "0.1"),
)
TRANSLATION = ("--task", "translation", *PAIR)
BOTH_WAYS = ("--lang-pairs", "en-ro,ro-en")
LM = ("--task", "language_modeling", "--tokens-per-sample", "32", "--sample-break-mode", "none")
MASKED = ("--tokens-per-sample", "32", "--criterion", "masked_lm", "--sample-break-mode", "none")
BART = ("-a", "bart_base", *TRANSFORMER, "--share-all-embeddings", "--max-source-positions", "64")
BART += ("--max-target-positions", "64")
UNBUFFERED = ("--data-buffer-size", "0")
"""For data sets that draw of torch's generator, by which a buffer's thread and dropout would take turns."""

LABELS = ("--max-positions", "64", "--num-classes", "2", "--init-token", "0", "--separator-token", "2")

# name -> (part of the data, flags)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "translation transformer": ("pair", (*TRANSLATION, "-a", "transformer", *TRANSFORMER)),
    "translation update-freq": (
        "pair",
        (*TRANSLATION, "-a", "transformer", *TRANSFORMER, "--update-freq", "2", "--max-epoch", "2"),
    ),
    "translation lstm": (
        "pair",
        (*TRANSLATION, "-a", "lstm_wiseman_iwslt_de_en", "--encoder-embed-dim", "8"),
    ),
    "translation fconv": (
        "pair",
        (*TRANSLATION, "-a", "fconv", "--encoder-layers", "[(8, 3)]", "--decoder-layers", "[(8, 3)]")
        + ("--encoder-embed-dim", "8", "--decoder-embed-dim", "8", "--decoder-out-embed-dim", "8"),
    ),
    "translation lightconv": (
        "pair",
        (*TRANSLATION, "-a", "lightconv", *TRANSFORMER, "--encoder-kernel-size-list", "[3]")
        + ("--decoder-kernel-size-list", "[3]", "--encoder-conv-dim", "8", "--decoder-conv-dim", "8")
        + ("--encoder-glu", "0", "--decoder-glu", "0"),
    ),
    "translation transformer_align": (
        "pair",
        (*TRANSLATION, "-a", "transformer_align", *TRANSFORMER, "--alignment-layer", "0")
        + ("--alignment-heads", "1"),
    ),
    "translation_lev levenshtein": (
        "pair",
        (*NAT, "-a", "levenshtein_transformer", "--noise", "random_delete", "--early-exit", "1,1,1"),
    ),
    "translation_lev nonautoregressive": (
        "pair",
        (*NAT, "-a", "nonautoregressive_transformer", "--noise", "full_mask", "--pred-length-offset")
        + ("--length-loss-factor", "0.1"),
    ),
    "translation_lev iterative": (
        "pair",
        (*NAT, "-a", "iterative_nonautoregressive_transformer", "--noise", "full_mask", "--train-step", "2")
        + ("--pred-length-offset", "--length-loss-factor", "0.1", "--dae-ratio", "0.5"),
    ),
    "translation_lev cmlm": ("pair", (*NAT, "-a", "cmlm_transformer", "--noise", "random_mask")),
    "translation_lev insertion": (
        "pair",
        (*NAT, "-a", "insertion_transformer", "--noise", "random_delete", "--label-tau", "1"),
    ),
    "translation_lev nacrf": (
        "pair",
        (*NAT, "-a", "nacrf_transformer", "--noise", "full_mask", "--pred-length-offset")
        + ("--length-loss-factor", "0.1", "--word-ins-loss-factor", "0.5", "--crf-lowrank-approx", "4")
        + ("--crf-beam-approx", "8"),
    ),
    "translation_from_pretrained_bart": (
        "pair",
        ("--task", "translation_from_pretrained_bart", *PAIR, "--langs", "en,ro", *BART),
    ),
    "translation_multi_simple_epoch": (
        "pair",
        ("--task", "translation_multi_simple_epoch", *BOTH_WAYS, "--langs", "en,ro", "-a", "transformer")
        + (*TRANSFORMER, "--encoder-langtok", "src", "--decoder-langtok", "--sampling-method", "temperature"),
    ),
    "multilingual_translation": (
        "pair",
        ("--task", "multilingual_translation", "-a", "multilingual_transformer", *BOTH_WAYS, *TRANSFORMER),
    ),
    "semisupervised_translation": (
        "pair",
        ("--task", "semisupervised_translation", "-a", "multilingual_transformer", *BOTH_WAYS, *TRANSFORMER)
        + ("--lambda-parallel-config", "1.0", "--lambda-denoising-config", "0")
        + ("--lambda-otf-bt-config", "0"),
    ),
    "online_backtranslation": (
        "mono",
        ("--task", "online_backtranslation", "-a", "transformer", *TRANSFORMER, "--share-all-embeddings")
        + ("--mono-langs", "en,ro", "--valid-lang-pairs", "en-ro", "--lambda-bt", "0:1,1:1")
        + ("--lambda-dae", "0:1,2:1"),
    ),
    "language_modeling transformer_lm": ("text", (*LM, "-a", "transformer_lm", *DECODER_LM)),
    "language_modeling lstm_lm": ("text", (*LM, "-a", "lstm_lm", "--decoder-embed-dim", "8")),
    "language_modeling fconv_lm": (
        "text",
        (*LM, "-a", "fconv_lm", "--decoder-embed-dim", "8", "--decoder-layers", "[(8, 3)]")
        + ("--decoder-attention", "False"),
    ),
    "language_modeling lightconv_lm": (
        "text",
        (*LM, "-a", "lightconv_lm", *DECODER_LM, "--decoder-kernel-size-list", "[3]")
        + ("--decoder-output-dim", "8", "--decoder-input-dim", "8"),
    ),
    "language_modeling adaptive": (
        "text",
        (*LM, "-a", "transformer_lm", *DECODER_LM, "--criterion", "adaptive_loss")
        + ("--adaptive-softmax-cutoff", "50,100", "--ddp-backend", "legacy_ddp"),
    ),
    "multilingual_language_modeling": (
        "languages",
        ("--task", "multilingual_language_modeling", "--tokens-per-sample", "32", "-a", "transformer_lm")
        + (*DECODER_LM, "--langs", "en,ro", "--sample-break-mode", "none"),
    ),
    "masked_lm roberta": ("text", ("--task", "masked_lm", *MASKED, "-a", "roberta", *ROBERTA)),
    "multilingual_masked_lm": (
        "languages",
        ("--task", "multilingual_masked_lm", *MASKED, "-a", "roberta", *ROBERTA),
    ),
    "legacy_masked_lm": (
        "text",
        ("--task", "legacy_masked_lm", "-a", "masked_lm", *ROBERTA, "--tokens-per-sample", "32")
        + ("--criterion", "legacy_masked_lm_loss", "--share-encoder-input-output-embed"),
    ),
    "cross_lingual_lm": (
        "text",
        ("--task", "cross_lingual_lm", "-a", "masked_lm", *ROBERTA, "--tokens-per-sample", "32")
        + ("--criterion", "legacy_masked_lm_loss", "--masked-lm-only", "--monolingual-langs", "en,ro"),
    ),
    "denoising": (
        "text",
        (
            "--task",
            "denoising",
            *BART,
            "--tokens-per-sample",
            "32",
            "--mask",
            "0.3",
            "--mask-length",
            "span-poisson",
        )
        + (
            "--replace-length",
            "1",
            "--rotate",
            "0",
            "--permute-sentences",
            "1",
            "--insert",
            "0.1",
            *UNBUFFERED,
        ),
    ),
    "multilingual_denoising": (
        "languages",
        ("--task", "multilingual_denoising", *BART, "--tokens-per-sample", "32", "--mask", "0.3")
        + ("--mask-length", "subword", "--langs", "en,ro", "--add-lang-token", *UNBUFFERED),
    ),
    "span_masked_lm": (
        "text",
        ("--task", "span_masked_lm", *BART, "--tokens-per-sample", "32", "--noise-density", "0.15"),
    ),
    "sentence_prediction": (
        "labels",
        ("--task", "sentence_prediction", "--criterion", "sentence_prediction", "-a", "roberta", *ROBERTA)
        + LABELS,
    ),
    "sentence_prediction_adapters": (
        "labels",
        ("--task", "sentence_prediction_adapters", "--criterion", "sentence_prediction_adapters")
        + ("-a", "roberta", *ROBERTA, *LABELS),
    ),
    "sentence_ranking": (
        "labels",
        ("--task", "sentence_ranking", "--criterion", "sentence_ranking", "-a", "roberta", *ROBERTA)
        + ("--max-positions", "64", "--num-classes", "1", "--init-token", "0", "--separator-token", "2"),
    ),
    "dummy_lm": (
        "",
        ("--task", "dummy_lm", "-a", "transformer_lm", *DECODER_LM, "--dataset-size", "64")
        + ("--dict-size", "996", "--tokens-per-sample", "32"),
    ),
    "dummy_mt": ("", ("--task", "dummy_mt", "-a", "transformer", *TRANSFORMER)),
    "dummy_masked_lm": (
        "",
        ("--task", "dummy_masked_lm", "-a", "roberta", *ROBERTA, "--criterion", "masked_lm")
        + ("--tokens-per-sample", "32"),
    ),
    "speech_to_text": (
        "speech",
        ("--task", "speech_to_text", "--config-yaml", "config.yaml", "-a", "s2t_transformer_s", *TRANSFORMER)
        + ("--conv-channels", "8", "--train-subset", "train"),
    ),
}

COMMON = (
    *("--cpu", "--max-update", "2", "--batch-size", "8", "--required-batch-size-multiple", "1"),
    *("--optimizer", "adam", "--lr", "0.003", "--num-workers", "0", "--log-format", "none", "--seed", "3"),
    *("--no-save", "--disable-validation", "--clip-norm", "1.0", "--distributed-world-size", "1"),
)

TIMES = ("wps", "ups", "train_wall", "wall", "gb_free")
"""What is logged of an update and is not the same twice."""


def make_data(folder: Path, text: Path) -> None:
    """Binarise *text* (``tests/data/enro``) in all the shapes that the tasks read, under *folder*."""
    from fairseq import options
    from fairseq_cli import preprocess

    def binarise(out: Path, *flags: str) -> None:
        parser = options.get_preprocessing_parser()
        preprocess.main(parser.parse_args([*flags, "--destdir", str(out), "--workers", "1"]))

    names = [("--trainpref", "train"), ("--validpref", "valid")]
    splits = [part for flag, name in names for part in (flag, str(text / name))]
    binarise(folder / "pair", *splits, "--source-lang", "en", "--target-lang", "ro", "--joined-dictionary")
    words = str(folder / "pair" / "dict.en.txt")
    for language in ("en", "ro"):
        one = [part for flag, name in names for part in (flag, f"{text / name}.{language}")]
        binarise(folder / "mono" / language, "--only-source", *one, "--srcdict", words)
        if language == "ro":  # resampling wants languages of different sizes
            one[1] = str(text / "test.ro")
        binarise(folder / "languages" / language, "--only-source", *one, "--srcdict", words)
    (folder / "languages" / "dict.txt").write_bytes(Path(words).read_bytes())
    for name in ("train", "valid"):  # as a pair of a language with itself, and the pair to validate on
        for language in ("en", "ro"):
            for end in ("bin", "idx"):
                source = folder / "mono" / language / f"{name}.{end}"
                (folder / "mono" / f"{name}.{language}-{language}.{language}.{end}").symlink_to(source)
    for language in ("en", "ro"):
        (folder / "mono" / f"dict.{language}.txt").write_bytes(Path(words).read_bytes())
    (folder / "mono" / "dict.txt").write_bytes(Path(words).read_bytes())
    (folder / "text").symlink_to(folder / "languages" / "en")
    for i, language in ((0, "en"), (1, "en"), (2, "ro")):
        (folder / "labels" / f"input{i}").parent.mkdir(exist_ok=True)
        (folder / "labels" / f"input{i}").symlink_to(folder / "mono" / language)
    (folder / "labels" / "label").mkdir()
    labels = folder / "labels.txt"
    labels.write_text("".join(f"{i % 2}\n" for i in range(len((text / "train.en").read_text().splitlines()))))
    binarise(folder / "labels" / "label", "--only-source", "--trainpref", str(labels))
    speech = folder / "speech"
    speech.mkdir()
    rows = ["id\taudio\tn_frames\ttgt_text"]
    random = np.random.RandomState(0)
    for i, line in enumerate((text / "train.ro").read_text(encoding="utf-8").split("\n")[:40]):
        frames = 40 + i % 7
        np.save(speech / f"{i}.npy", random.randn(frames, 80).astype(np.float32))
        rows.append(f"{i}\t{speech / f'{i}.npy'}\t{frames}\t{line}")
    (speech / "train.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (speech / "dict.txt").write_bytes(Path(words).read_bytes())
    (speech / "config.yaml").write_text(
        "input_channels: 1\ninput_feat_per_channel: 80\nvocab_filename: dict.txt\n"
    )


def train(data: list[str], flags: tuple[str, ...]) -> dict[str, Any]:
    """Losses of all updates; a hash of all parameters and of the optimizer's state at the end."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer
    from fairseq_cli.train import main

    losses: list[dict[str, float]] = []
    trainers: list[Any] = []
    train_step = Trainer.train_step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = train_step(self, *args, **kwargs)
        losses.append({name: float(value) for name, value in output.items() if name not in TIMES})
        trainers[:] = [self]
        return output

    Trainer.train_step = step
    args = options.parse_args_and_arch(options.get_training_parser(), [*data, *COMMON, *flags])
    main(convert_namespace_to_omegaconf(args))
    digest = hashlib.sha256()
    for part in (trainers[0].model.state_dict(), trainers[0].optimizer.state_dict()):
        for name, value in flattened(part):
            digest.update(name.encode())
            digest.update(value.numpy().tobytes() if torch.is_tensor(value) else str(value).encode())
    return {"losses": losses, "state": digest.hexdigest()}


def flattened(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key in value for pair in flattened(value[key], f"{name}.{key}")]
    if isinstance(value, (list, tuple)):
        return [pair for i, part in enumerate(value) for pair in flattened(part, f"{name}.{i}")]
    return [(name, value)]


def in_a_fork(data: list[str], flags: tuple[str, ...]) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found: dict[str, Any] = train(data, flags)
        except BaseException as error:
            found = {
                "error": f"{type(error).__name__}: {error}"[:300],
                "trace": traceback.format_exc()[-1500:] + said.getvalue()[-300:],
            }
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}


def run(how: str, data: Path, names: list[str]) -> dict[str, Any]:
    import logging

    torch.set_num_threads(1)
    if how == "plugin":
        import surface_fusion  # noqa: F401
    import fairseq_cli.train  # noqa: F401

    logging.disable()
    found = {}
    for name in names or CASES:
        part, flags = CASES[name]
        found[name] = in_a_fork([str(data / part)] if part else [], flags)
    return found


def main() -> None:
    """See above."""
    if sys.argv[1] == "data":
        make_data(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        results = run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
        assert ("surface_fusion" in sys.modules) == (sys.argv[1] == "plugin")
        print(json.dumps(results))
