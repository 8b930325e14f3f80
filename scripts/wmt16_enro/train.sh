#!/usr/bin/env bash
# Train the published model on the output of prepare.sh, with the published flags except for optimizer and criterion,
# which compute the same formulas several times as fast.
#
#   train.sh [OUT] [--direction en-ro|ro-en] [--vanilla] [--gpus N] [--run NAME] [-- FAIRSEQ FLAGS]
#
# OUT          as for prepare.sh; default: runs/wmt16_enro in the clone
# --direction  en-ro (default) or ro-en
# --vanilla    the paper's baseline, a plain Transformer: the same flags without surface fusion
# --gpus       1, 2, 4 or 8; default: all visible GPUs; 0: the CPU, without --fp16 (for tests)
# --run        name of this training; default: the direction, followed by -vanilla for the baseline
# FLAGS        flags of fairseq-train; they override the published values
#
# An update is 16,384 tokens for each N: 2048 per GPU and batch, summed over 8/N batches. 60,000 updates, 65 million
# parameters. Writes OUT/checkpoints/RUN: three checkpoints of about 800 MB, and train.log. If it is run again, it
# resumes from the last checkpoint (one is written after each epoch).

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out='' direction=en-ro vanilla='' gpus='' run=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage ;;
        --direction) need_value "$1" $#; direction=$2; shift ;;
        --gpus) need_value "$1" $#; gpus=$2; shift ;;
        --run) need_value "$1" $#; run=$2; shift ;;
        --vanilla) vanilla=-vanilla ;;
        --) shift; break ;;
        -*) die "unknown option $1; flags for fairseq go after --" ;;
        *) [ -z "$out" ] || die "one argument too many: $1; flags for fairseq go after --"; out=$1 ;;
    esac
    shift
done
out=${out:-$clone/runs/wmt16_enro}
split_direction "$direction"
run=${run:-$direction$vanilla}
need_data "$out"
find_python

seen=$("$python" -c 'import torch; print(torch.cuda.device_count())')
gpus=${gpus:-$seen}
case $gpus in
    0 | 1 | 2 | 4 | 8) ;;
    *) die "$gpus GPUs cannot share 8 batches of 2048 tokens evenly; give --gpus 1, 2, 4 or 8" ;;
esac
[ "$gpus" -le "$seen" ] || die "--gpus $gpus: torch sees $seen"

if [ "$gpus" -eq 0 ]; then
    device=(--cpu) update_freq=8
else
    device=(--fp16 --distributed-world-size "$gpus") update_freq=$((8 / gpus))
fi
if [ -z "$vanilla" ]; then
    model=(--surfacefusion att --sf-gate 0.8 --sf-mode hard)
else
    # The published code's default for all models; fairseq's is 0.
    model=(--attention-dropout 0.1)
fi

save=$out/checkpoints/$run
mkdir -p "$save"
exec > >(tee -a "$save/train.log") 2>&1
# exec, so that a scheduler's signals reach the training.
exec "$python" -m surface_fusion train \
    "$out/data-bin" --source-lang "$src" --target-lang "$tgt" \
    --arch transformer_surface_fusion --share-all-embeddings \
    --optimizer flat_adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
    --lr-scheduler inverse_sqrt --warmup-init-lr 1e-07 --warmup-updates 4000 \
    --lr 0.0005 --min-lr 1e-09 \
    --dropout 0.3 --weight-decay 0.0 \
    --criterion fused_label_smoothed_cross_entropy --label-smoothing 0.1 \
    --save-dir "$save" --seed 333 --ddp-backend=no_c10d "${device[@]}" \
    --max-tokens 2048 --update-freq "$update_freq" --max-update 60000 --keep-last-epochs 1 \
    "${model[@]}" "$@"
