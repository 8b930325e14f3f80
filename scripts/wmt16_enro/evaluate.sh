#!/usr/bin/env bash
# Translate the test set with the best checkpoint, as published: beam 4, length penalty 1, BPE removed.
#
#   evaluate.sh [OUT] [--direction en-ro|ro-en] [--vanilla] [--run NAME] [-- FAIRSEQ FLAGS]
#
# OUT, --direction, --vanilla, --run   as for train.sh
# FLAGS                                flags of fairseq-generate (--cpu, --fp16, --gen-subset valid, ...)
#
# Writes OUT/checkpoints/RUN/generate.txt and prints the scores with an explanation. Uses one GPU (about a minute for
# the 1,999 test pairs) or the CPU.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out='' direction=en-ro vanilla='' run=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage ;;
        --direction) need_value "$1" $#; direction=$2; shift ;;
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
save=$out/checkpoints/$run
[ -f "$save/checkpoint_best.pt" ] || die "$save/checkpoint_best.pt is missing; run train.sh first"
find_python

partial=$save/.generate.$$
trap 'rm -f "$partial"' EXIT
"$python" -m surface_fusion generate \
    "$out/data-bin" --source-lang "$src" --target-lang "$tgt" \
    --path "$save/checkpoint_best.pt" \
    --beam 4 --lenpen 1.0 --remove-bpe \
    "$@" >"$partial"
mv "$partial" "$save/generate.txt"

echo "$run, fairseq-generate: $(sed -n 's/^Generate [^:]*: //p' "$save/generate.txt")"
if [ "$direction" = en-ro ]; then
    echo '  The paper'"'"'s authors report "nearly 35.1" for this number, from their own en-ro run of 60,000 updates.'
fi
echo "  It is BLEU of tokenised text with BPE removed, against a reference in the same tokens: compare it only with"
echo "  the same number on the same archive, not with a sacreBLEU of plain text. The same tokens by sacreBLEU:"
"$python" -m surface_fusion score --generate-output "$save/generate.txt" --lang "$tgt" 2>/dev/null
