"""Tiny tasks, models and batches, built from flags as a user gives them, through fairseq's own parser."""

import tempfile
from argparse import Namespace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from torch import Tensor, nn

import surface_fusion

USER_DIR = str(Path(surface_fusion.__file__).parent)
ARCH = "transformer_surface_fusion"
VOCAB = 64  # above 50: the published pooling leaves out ids below that
PAD, EOS, FIRST_WORD = 1, 2, 4

SIZES = (
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "24"),
    *("--encoder-layers", "2", "--decoder-layers", "2"),
    *("--encoder-attention-heads", "2", "--decoder-attention-heads", "2"),
    *("--dropout", "0", "--attention-dropout", "0"),
)
SHARED = "--share-all-embeddings"
DICTIONARIES = tempfile.TemporaryDirectory(prefix="surface_fusion_test_")


@lru_cache
def data_folder(n_src: int = VOCAB, n_tgt: int = VOCAB) -> str:
    """A data folder with nothing but two dictionaries of these sizes (special symbols included)."""
    folder = Path(DICTIONARIES.name, f"{n_src}_{n_tgt}")
    folder.mkdir(exist_ok=True)
    for language, entries in (("en", n_src), ("ro", n_tgt)):
        words = (f"w{i} {entries - i}\n" for i in range(FIRST_WORD, entries))
        (folder / f"dict.{language}.txt").write_text("".join(words))
    return str(folder)


def parse(*flags: str, arch: str = ARCH, data: str | None = None) -> Namespace:
    """What ``fairseq-train DATA --user-dir surface_fusion -a ARCH FLAGS`` sees."""
    languages = ("-s", "en", "-t", "ro", "--cpu", "--user-dir", USER_DIR, "-a", arch)
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, [data or data_folder(), *languages, *flags])


def build(
    *flags: str, arch: str = ARCH, seed: int = 1, vocab: tuple[int, int] = (VOCAB, VOCAB)
) -> tuple[Any, Any]:
    """A model of ``SIZES`` with *flags*, as initialised under *seed*, and its translation task."""
    args = parse(*SIZES, *flags, arch=arch, data=data_folder(*vocab))
    task = tasks.setup_task(args)
    torch.manual_seed(seed)
    return task.build_model(args), task


def shaken(*flags: str, seed: int = 1, **kwargs: Any) -> Any:
    """A model in eval mode with every parameter away from its initial value, the zeros and ones too."""
    model, _ = build(*flags, seed=seed, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def pad_rows(rows: list[Tensor], left: bool, extra: int = 0) -> Tensor:
    """Token rows of several lengths as one matrix, with *extra* columns of padding alone."""
    width = max(map(len, rows)) + extra
    out = torch.full((len(rows), width), PAD)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        out[i, columns] = row
    return out


def batch(
    src_lengths: tuple[int, ...] = (5, 7, 3),
    tgt_lengths: tuple[int, ...] = (6, 4, 5),
    *,
    left_pad_source: bool = True,
    extra_src: int = 0,
    extra_tgt: int = 0,
    vocab: tuple[int, int] = (VOCAB, VOCAB),
    seed: int = 0,
) -> dict[str, Any]:
    """A random sample as fairseq's translation task collates it; lengths count ``</s>``."""
    generator = torch.Generator().manual_seed(seed)
    eos = torch.tensor([EOS])

    def sentences(lengths: tuple[int, ...], words: int) -> list[Tensor]:
        return [
            torch.cat([torch.randint(FIRST_WORD, words, (n - 1,), generator=generator), eos]) for n in lengths
        ]

    src, tgt = sentences(src_lengths, vocab[0]), sentences(tgt_lengths, vocab[1])
    return {
        "id": torch.arange(len(src)),
        "nsentences": len(src),
        "ntokens": sum(tgt_lengths),
        "net_input": {
            "src_tokens": pad_rows(src, left_pad_source, extra_src),
            "src_lengths": torch.tensor(src_lengths),
            "prev_output_tokens": pad_rows([torch.cat([eos, t[:-1]]) for t in tgt], False, extra_tgt),
        },
        "target": pad_rows(tgt, False, extra_tgt),
    }


def log_probs(model: Any, sample: dict[str, Any]) -> Tensor:
    """The model's log-probabilities of every next token: B x T x V."""
    return model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)


def loss(model: Any, sample: dict[str, Any]) -> Tensor:
    """Summed negative log-probability of the targets that are not padding."""
    target = sample["target"]
    picked = log_probs(model, sample).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -picked[target.ne(PAD)].sum()


def gradients(model: nn.Module, sample: dict[str, Any]) -> dict[str, Tensor | None]:
    """Gradient of :func:`loss` by parameter name."""
    model.zero_grad()
    loss(model, sample).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def beam_batch(sentences: int = 3, beam: int = 3, **kwargs: Any) -> dict[str, Any]:
    """A batch of *beam* different target prefixes for each of *sentences* sources, as in beam search."""
    sample = batch(
        tuple(range(3, 3 + sentences)), tuple(5 + i % 3 for i in range(sentences * beam)), **kwargs
    )
    for name in ("src_tokens", "src_lengths"):
        sample["net_input"][name] = sample["net_input"][name].repeat_interleave(beam, 0)
    return sample


def beam_orders(steps: int, sentences: int = 3, beam: int = 3, seed: int = 0) -> list[Tensor]:
    """Reorderings as in beam search: within a sentence, with repetitions, and one sentence ends."""
    generator = torch.Generator().manual_seed(seed)
    orders = []
    for step in range(steps):
        survivors = torch.arange(sentences)
        if step == steps // 2:
            survivors = survivors[survivors != 1]
            sentences -= 1
        within = torch.randint(beam, (len(survivors), beam), generator=generator)
        orders.append((survivors[:, None] * beam + within).flatten())
    return orders


def incremental_log_probs(model: Any, sample: dict[str, Any], orders: list[Tensor] | None = None) -> Tensor:
    """Log-probabilities of the given prefix, decoded token by token: B x T x V.

    Args:
        orders: how beam search reorders the rows before each step; the rows of the result are in the final
            order.
    """
    net = sample["net_input"]
    encoder_out = model.encoder.forward_torchscript(net)
    state: dict[str, Any] = {}
    tokens, steps = net["prev_output_tokens"], []
    for step in range(tokens.shape[1]):
        if orders is not None:
            order = orders[step]
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            tokens, steps = tokens[order], [s[order] for s in steps]
        logits, extra = model.decoder(tokens[:, : step + 1], encoder_out=encoder_out, incremental_state=state)
        steps.append(model.get_normalized_probs((logits[:, -1:], extra), log_probs=True))
    return torch.cat(steps, dim=1)


@torch.no_grad()
def assert_incremental_equals_full(model: Any) -> None:
    """Token by token equals one pass at every real position, also through the reorderings of beam search."""
    sample = beam_batch()
    real = sample["target"].ne(PAD)
    full = log_probs(model, sample)
    torch.testing.assert_close(incremental_log_probs(model, sample)[real], full[real], atol=2e-5, rtol=1e-5)
    orders = beam_orders(real.shape[1])
    rows = torch.arange(len(real))
    for order in orders:
        rows = rows[order]
    steps = incremental_log_probs(model, sample, orders)
    torch.testing.assert_close(steps[real[rows]], full[rows][real[rows]], atol=2e-5, rtol=1e-5)
