"""The verbs of ``surface-fusion`` with a line of help each; imports nothing, so that ``--help`` is fast."""

FAIRSEQ_VERBS = {
    "preprocess": "build dictionaries and binarise parallel text",
    "train": "train a model or resume training",
    "generate": "translate a binarised test set",
    "interactive": "translate plain text, line by line",
    "validate": "loss and perplexity of a checkpoint on a data set",
}
"""fairseq's commands, which ``fairseq_verbs.py`` runs."""

OWN_VERBS = {
    "translate": "translate raw text from standard input, line by line",
    "score": "sacreBLEU, chrF and tokenised BLEU of a translation",
    "average": "average the parameters of checkpoints into one",
    "info": "describe a checkpoint; without one, print the versions for a bug report",
    "analyse": "draw figures and tables about a trained model",
}
"""Others; each is a module of this package."""

SUMMARIES = FAIRSEQ_VERBS | OWN_VERBS
