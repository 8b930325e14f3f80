"""A training of a few seconds on real text, as a command line."""

from tests.helpers.paths import ENRO

TEXT = ENRO

PREPROCESS = (
    *("--source-lang", "en", "--target-lang", "ro", "--joined-dictionary"),
    *("--trainpref", TEXT / "train", "--validpref", TEXT / "valid", "--testpref", TEXT / "test"),
)
SIZES = (
    *("--encoder-layers", 1, "--decoder-layers", 1),
    *("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--share-all-embeddings"),
    *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
)
FUSION = ("-a", "transformer_surface_fusion", *SIZES, "--surfacefusion", "att", "--sf-gate", 0.8)
PLAIN = ("-a", "transformer", *SIZES)
OPTIMISER = (
    *("--cpu", "--optimizer", "adam", "--lr", 0.005, "--max-tokens", 400, "--log-format", "simple"),
    *("--lr-scheduler", "fixed", "--clip-norm", 0),
    *("--num-workers", 0),  # in one process after another: torch waits seconds for a data worker to end
    *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
)
TRAIN = (*FUSION, *OPTIMISER)
