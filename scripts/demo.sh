#!/usr/bin/env bash
# Sets everything up, trains an English-Romanian model with surface fusion on the sample in this repository,
# translates the test set, scores the translation and draws the learning curve. Takes minutes on 2 CPU cores.
#
#   scripts/demo.sh            the complete demo, in runs/demo
#   scripts/demo.sh --quick    20 updates, in runs/demo-quick, to test the installation
#
# If it is run again, it continues where it stopped; delete the folder in runs/ to start over. Other flags are
# passed to the training (for example --cpu, --seed 2) and must be the same in each run of a folder.
set -euo pipefail

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
scripts=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$scripts")
name=demo
updates=1240
warmup=124
interval=31
if [[ ${1:-} == --quick ]]; then
    shift
    name=demo-quick
    updates=20
    warmup=10
    interval=5
fi
run=$root/runs/$name
data=$scripts/demo/data

if [[ -f $run/flags && $(<"$run/flags") != "$*" ]]; then
    echo "demo.sh: $run was started with the flags '$(<"$run/flags")', not '$*'; delete it to start over" >&2
    exit 2
fi

venv=$("$scripts/setup.sh" plot)
export PATH=$venv/bin:$PATH
# Waiting threads sleep instead of spinning, which would slow updates tenfold on a machine with other work.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
mkdir -p "$run"
printf "%s\n" "$*" >"$run/flags"

step() { printf '\n== %s\n' "$*"; }
# short PATH: print PATH relative to the clone.
short() { printf '%s' "${1#"$root"/}"; }
# failed LOG: print the end of a failed command's log and exit.
failed() {
    tail -n 20 "$1" >&2
    echo "demo.sh: failed, see above and $1" >&2
    exit 1
}
[[ $(pwd -P) == "$root" ]] || printf 'Paths below are relative to %s\n' "$root"

if [[ ! -d $run/data-bin ]]; then
    step "Segmenting the text into 4,000 joint sentencepiece units and binarising it"
    python "$scripts/demo/segment.py" "$data" "$run/pieces" --langs en ro --vocab-size 4000
    new=$(mktemp -d "$run/.data-bin.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    surface-fusion preprocess -s en -t ro --joined-dictionary --trainpref "$run/pieces/train" \
        --validpref "$run/pieces/valid" --testpref "$run/pieces/test" --destdir "$new" >"$run/preprocess.log" 2>&1 ||
        failed "$run/preprocess.log"
    chmod "$(printf '%o' $((0777 & ~$(umask))))" "$new"
    mv "$new" "$run/data-bin"
fi

step "Training: 3+3 layers, 192/768, hard surface fusion (gate 0.8, renormalised), $updates updates"
if [[ -f $run/trained && $(<"$run/trained") == "$updates $*" ]]; then
    echo "done already, log: $(short "$run/train.log")"
else
    echo "losses: negative log-likelihood in bits per token; fairseq's log: $(short "$run/train.log")"
    surface-fusion train "$run/data-bin" -s en -t ro -a transformer_surface_fusion \
        --encoder-layers 3 --encoder-embed-dim 192 --encoder-ffn-embed-dim 768 --encoder-attention-heads 4 \
        --decoder-layers 3 --decoder-embed-dim 192 --decoder-ffn-embed-dim 768 --decoder-attention-heads 4 \
        --encoder-normalize-before --decoder-normalize-before --share-all-embeddings \
        --surfacefusion att --sf-mode hard --sf-gate 0.8 --sf-renormalize \
        --dropout 0.1 --attention-dropout 0 --criterion fused_label_smoothed_cross_entropy --label-smoothing 0.1 \
        --optimizer flat_adam --adam-betas '(0.9, 0.98)' --lr 0.002 --clip-norm 1.0 \
        --lr-scheduler polynomial_decay --warmup-updates $warmup --total-num-update $updates \
        --max-tokens 1000 --max-update $updates --seed 1 --num-workers 0 \
        --no-epoch-checkpoints --save-interval-updates 50 --keep-interval-updates 1 --save-dir "$run/checkpoints" \
        --log-format json --log-interval $interval --no-progress-bar "$@" |
        tee -a "$run/train.log" | python "$scripts/demo/progress.py" --updates $updates
    echo "$updates $*" >"$run/trained"
fi

step "Translating the test set, beam 4"
# The last checkpoint: the learning rate has decayed to 0 by then.
surface-fusion generate "$run/data-bin" -s en -t ro --path "$run/checkpoints/checkpoint_last.pt" \
    --beam 4 --lenpen 1.0 --max-tokens 4000 --num-workers 0 --remove-bpe sentencepiece \
    --results-path "$run" >"$run/generate.log" 2>&1 || failed "$run/generate.log"
mv "$run/generate-test.txt" "$run/generate.txt"
grep '^H-' "$run/generate.txt" | sort -t- -k2 -n | cut -f3 >"$run/test.hyp.ro"
[[ $name == demo ]] || echo "(random words after $updates updates: this tests the installation only)"
paste "$data/test.en" "$run/test.hyp.ro" | sed -n '1,5{s/\t/\n    /;p}'

step "Scores against $(short "$data/test.ro")"
surface-fusion score --hyp "$run/test.hyp.ro" --ref "$data/test.ro" --romanian | tee "$run/scores.txt"

step "Learning curve"
python "$scripts/demo/plot_curve.py" "$run/train.log" -o "$run/learning_curve.png"
printf 'picture:      %s\nmodel:        %s\ntranslations: %s\n' \
    "$(short "$run/learning_curve.png")" "$(short "$run/checkpoints/checkpoint_last.pt")" "$(short "$run/test.hyp.ro")"
