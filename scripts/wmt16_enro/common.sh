# shellcheck shell=bash
# Functions of the three scripts of this folder, which source this file.

clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

die() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# The comment at the head of the script is its help.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
}

# Set python: the active one if it has fairseq, otherwise that of the environment of scripts/setup.sh.
find_python() {
    export PYTHONPATH="$clone${PYTHONPATH:+:$PYTHONPATH}"
    for python in python python3 "${SURFACE_FUSION_VENV:-$clone/.venv}/bin/python"; do
        if "$python" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("fairseq_cli") is None)' 2>/dev/null
        then
            return
        fi
    done
    die "no python with fairseq found; run scripts/setup.sh, or activate an environment that has surface-fusion"
}

# Set src and tgt from "en-ro" or "ro-en".
# shellcheck disable=SC2034 # the scripts use them
split_direction() {
    case $1 in
        en-ro | ro-en) src=${1%-*} tgt=${1#*-} ;;
        *) die "--direction $1: unknown, choose en-ro or ro-en" ;;
    esac
}

# need_value OPTION REMAINING_ARGUMENTS: exit if OPTION has no value.
need_value() {
    [ "$2" -ge 2 ] || die "$1 needs a value"
}

# need_data OUT: exit if prepare.sh has not run.
need_data() {
    [ -f "$1/data-bin/dict.en.txt" ] || die "$1/data-bin is missing; run prepare.sh ARCHIVE $1 first"
}
