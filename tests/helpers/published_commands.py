"""The flags in the README of the authors' repository."""

import shlex
from pathlib import Path

TRAIN = r"""
    --arch transformer_surface_fusion --share-all-embeddings
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0
    --lr-scheduler inverse_sqrt --warmup-init-lr 1e-07 --warmup-updates 4000
    --lr 0.0005 --min-lr 1e-09
    --dropout 0.3  --weight-decay 0.0
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --save-dir $OUTPUT --seed 333 --ddp-backend=no_c10d --fp16
    --max-tokens 2048 --update-freq 1 --max-update 60000 --keep-last-epochs 1
    --surfacefusion att --sf-gate 0.8 --sf-mode hard
"""
GENERATE = "--path $OUTPUT/checkpoint_best.pt --beam 4 --lenpen 1.0 --remove-bpe"

FAST = {"adam": "flat_adam", "label_smoothed_cross_entropy": "fused_label_smoothed_cross_entropy"}
"""What our recipes have instead: the same formulas, faster. All else is the published command's."""


def flags(command: str, output: Path) -> list[str]:
    """*command* as a list, with *output* for ``$OUTPUT``."""
    return [arg.replace("$OUTPUT", str(output)) for arg in shlex.split(command)]
