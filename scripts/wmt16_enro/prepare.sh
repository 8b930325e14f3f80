#!/usr/bin/env bash
# Binarise the WMT16 English-Romanian archive of dl4mt-nonauto, for both directions.
#
#   prepare.sh ARCHIVE [OUT] [--workers N]
#
# ARCHIVE   wmt16.tar.gz, which you must download yourself (https://github.com/nyu-dl/dl4mt-nonauto links to it).
#           It contains tokenised text segmented by a joint BPE:
#           wmt16/en-ro/{train/corpus.bpe,dev/dev.bpe,test/test.bpe}.{en,ro}
# OUT       folder of the experiment; default: runs/wmt16_enro in the clone
# --workers processes that read the text; default: all cores, at most 20
#
# Writes OUT/wmt16 (the six text files) and OUT/data-bin (with a joined dictionary, for both directions). Both
# appear only when they are complete; if they exist, the script does nothing. Needs no GPU, about 1 GB of disk and
# some minutes on a few cores for the 610 thousand pairs.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

archive='' out='' workers=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage ;;
        --workers) need_value "$1" $#; workers=$2; shift ;;
        -*) die "unknown option $1; see --help" ;;
        *)
            if [ -z "$archive" ]; then archive=$1
            elif [ -z "$out" ]; then out=$1
            else die "one argument too many: $1; see --help"
            fi
            ;;
    esac
    shift
done
out=${out:-$clone/runs/wmt16_enro}
[ -n "$archive" ] || die "no archive given; use prepare.sh path/to/wmt16.tar.gz [OUT]"
[ -f "$archive" ] || die "archive $archive does not exist"
if [ -z "$workers" ]; then
    workers=$(getconf _NPROCESSORS_ONLN)
    [ "$workers" -le 20 ] || workers=20
fi
[[ $workers =~ ^[1-9][0-9]*$ ]] || die "--workers $workers: give a whole number of at least 1"

sum=$(cksum <"$archive")
if [ -d "$out/data-bin" ]; then
    [ "$(cat "$out/archive.cksum" 2>/dev/null)" = "$sum" ] ||
        die "$out was prepared from another archive; give another OUT, or remove $out/data-bin"
    echo "$out/data-bin is complete already; remove it to binarise again"
    exit 0
fi
find_python

members=$(tar -tf "$archive" 2>/dev/null) || die "$archive is not a tar archive, or is damaged"
wanted=()
for text in train/corpus.bpe dev/dev.bpe test/test.bpe; do
    for lang in en ro; do
        name=wmt16/en-ro/$text.$lang
        # In some archives, all names begin with ./
        member=$(grep -m 1 -x -e "$name" -e "\./$name" <<<"$members") || die "$archive lacks $name"
        wanted+=("$member")
    done
done

mkdir -p "$out"
work=$(mktemp -d "$out/.preparing.XXXXXX")
trap 'rm -rf "$work"' EXIT
tar -xf "$archive" -C "$work" "${wanted[@]}"
raw=$work/wmt16/en-ro
for text in train/corpus.bpe dev/dev.bpe test/test.bpe; do
    en=$(wc -l <"$raw/$text.en") ro=$(wc -l <"$raw/$text.ro")
    [ "$en" -gt 0 ] || die "$archive: wmt16/en-ro/$text.en is empty"
    [ "$en" -eq "$ro" ] || die "$archive: wmt16/en-ro/$text has $((en)) lines in .en but $((ro)) in .ro"
done

"$python" -m surface_fusion preprocess \
    --source-lang en --target-lang ro \
    --trainpref "$raw/train/corpus.bpe" \
    --validpref "$raw/dev/dev.bpe" \
    --testpref "$raw/test/test.bpe" \
    --destdir "$work/data-bin" \
    --joined-dictionary \
    --workers "$workers"

rm -rf "$out/wmt16"
mv "$work/wmt16" "$out/wmt16"
echo "$sum" >"$out/archive.cksum"
mv "$work/data-bin" "$out/data-bin"
echo "$out/data-bin is complete: $(wc -l <"$out/wmt16/en-ro/train/corpus.bpe.en" | tr -d ' ') training pairs"
