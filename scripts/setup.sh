#!/usr/bin/env bash
# Sets everything up in a virtual environment inside the clone; the second time there is nothing left to do.
#
#   scripts/setup.sh [EXTRA...]      extras of pyproject.toml: docs, plot, test
#
# Prints a line for each step (stderr), then the environment's folder (stdout).
#
# SURFACE_FUSION_PYTHON  the Python to build on (default: the first of python3, python3.12, ... that is supported)
# SURFACE_FUSION_VENV    where the environment goes (default: .venv in the clone); one that exists is added to
# SURFACE_FUSION_TORCH   what pip is asked for (default: a torch >= 2.6 that is there already, else torch==2.13.0)
#
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) choose the index, and so a CPU or a
# CUDA build of torch.
set -euo pipefail

tested_torch="torch==2.13.0"
supported="3.11 and 3.12 (Linux x86_64: wheels only), 3.10 and 3.13 (and other machines: with a C++ compiler)"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

# Empty where the command is no Python.
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }

# Whether the Python sees a torch >= 2.6 (by its metadata: importing it takes seconds).
has_torch() {
    "$1" - 2>/dev/null <<'PY'
import re
from importlib.metadata import version
raise SystemExit([int(n) for n in re.findall(r"\d+", version("torch"))[:2]] < [2, 6])
PY
}

# Prints the Python to build on; one for which there are wheels of everything where there is one.
find_python() {
    local candidate version seen=""
    if [[ -n ${SURFACE_FUSION_PYTHON:-} ]]; then
        version=$(version_of "$SURFACE_FUSION_PYTHON")
        [[ -n $version ]] || fail "SURFACE_FUSION_PYTHON=$SURFACE_FUSION_PYTHON does not run as a Python"
        [[ $version =~ ^3\.1[0-3]\. ]] || fail "SURFACE_FUSION_PYTHON is Python $version; supported: $supported"
        printf '%s\n' "$SURFACE_FUSION_PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11; do
        version=$(version_of "$candidate")
        [[ ! $version =~ ^3\.1[12]\. ]] || { printf '%s\n' "$candidate" && return; }
    done
    for candidate in python3 python3.13 python3.10; do
        version=$(version_of "$candidate")
        [[ ! $version =~ ^3\.1[03]\. ]] || { printf '%s\n' "$candidate" && return; }
        seen+=${version:+ Python $version}
    done
    fail "no supported Python on PATH (found:${seen:- none}); supported: $supported;" \
        "install one or name it in SURFACE_FUSION_PYTHON"
}

make_venv() {
    local python version options=()
    python=$(find_python)
    version=$(version_of "$python")
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
        "Python $version ($python) cannot make virtual environments: it lacks venv or ensurepip" \
        "(Debian, Ubuntu: apt-get install python3-venv)"
    # A torch outside of any virtual environment can be kept; one inside cannot be seen from another.
    if [[ -z ${SURFACE_FUSION_TORCH:-} ]] && has_torch "$python" \
        && "$python" -c 'import sys; raise SystemExit(sys.prefix != sys.base_prefix)'; then
        options=(--system-site-packages)
    fi
    say "making $venv with Python $version${options:+, keeping its torch}"
    "$python" -m venv ${options[@]+"${options[@]}"} "$venv" >&2 || fail "could not make $venv, see above"
}

# install WHAT PIP_ARGUMENT...: pip's output goes to the log; where it fails, the log's end and one line.
install() {
    say "installing $1"
    shift
    "$py" -m pip install --no-input --disable-pip-version-check "$@" >>"$log" 2>&1 && return
    tail -n 15 "$log" >&2
    fail "pip install $* failed, see above and $log"
}

# A stamp is good for one Python, one request and one pyproject.toml.
stamp_key() { printf '%s %s %s' "$(version_of "$py")" "${SURFACE_FUSION_TORCH:-}" "$(cksum <"$root/pyproject.toml")"; }

# Arguments, sorted, without doubles and empty ones, joined by commas.
joined() { printf '%s\n' "$@" | sed '/^$/d' | sort -u | paste -sd, -; }

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${SURFACE_FUSION_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
py=$venv/bin/python
stamp=$venv/surface-fusion-setup.stamp
log=$venv/surface-fusion-setup.log
for extra in "$@"; do
    [[ $extra == docs || $extra == plot || $extra == test ]] ||
        fail "there is no extra '$extra'; choose from docs, plot, test"
done
extras=$(joined "$@")

mkdir -p "$venv" 2>/dev/null || fail "cannot make the folder $venv; set SURFACE_FUSION_VENV to another place"
if command -v flock >/dev/null; then # two at once would spoil each other's work
    exec 9>"$venv/surface-fusion-setup.lock"
    flock 9
fi

if [[ -e $py || -L $py ]]; then
    version=$(version_of "$py")
    [[ -n $version ]] || fail "the Python of $venv does not start any more; delete that folder and run this again"
    [[ $version =~ ^3\.1[0-3]\. ]] || fail "$venv has Python $version; supported: $supported"
    if [[ -n ${SURFACE_FUSION_PYTHON:-} ]]; then
        asked=$(version_of "$SURFACE_FUSION_PYTHON")
        [[ ${version%.*} == "${asked%.*}" ]] || fail \
            "$venv has Python $version but SURFACE_FUSION_PYTHON is ${asked:-no Python};" \
            "delete that folder or set SURFACE_FUSION_VENV to another place"
    fi
fi
if [[ -f $stamp ]]; then
    { read -r made_for && read -r key && read -r installed; } <"$stamp"
    # The commands in bin/ hold the folder's name, and the package is used from where the clone is.
    [[ $made_for == "$root, $venv" ]] || fail \
        "$venv was set up under another name ($made_for); delete that folder and run this again"
    if [[ $key == "$(stamp_key)" ]]; then
        IFS=, read -ra before <<<"$installed"
        extras=$(joined "$@" ${before[@]+"${before[@]}"})
        if [[ $extras == "$installed" ]]; then
            printf '%s\n' "$venv"
            exit 0
        fi
    fi
fi

"$py" -m pip --version >/dev/null 2>&1 || make_venv
version=$(version_of "$py")
rm -f "$stamp"
say "pip's output goes to $log"
: >"$log"

# torch first: left to the resolver it may become another build.
if [[ -n ${SURFACE_FUSION_TORCH:-} ]]; then
    read -ra request <<<"$SURFACE_FUSION_TORCH"
    install "$SURFACE_FUSION_TORCH" "${request[@]}"
elif ! has_torch "$py"; then
    install "$tested_torch" "$tested_torch"
fi
if ! [[ $version =~ ^3\.1[12]\. && $(uname -sm) == "Linux x86_64" ]]; then
    # No fairseq has a wheel here: built with the torch above (a build in isolation would fetch one of its own).
    fairseq=$(grep -oE 'fairseq-fixed==[0-9.]+' "$root/pyproject.toml")
    command -v g++ >/dev/null || command -v c++ >/dev/null || fail \
        "with Python $version on $(uname -sm), $fairseq has to be compiled and there is no C++ compiler" \
        "(Debian, Ubuntu: apt-get install g++)"
    install "what $fairseq is built with" numpy cython "setuptools>=77" wheel
    install "$fairseq (compiles for some minutes)" --no-build-isolation --no-deps "$fairseq"
fi
(cd "$root" && install "surface-fusion${extras:+ with $extras}" -e ".${extras:+[$extras]}")
if ! "$py" -c 'import fairseq, surface_fusion' >>"$log" 2>&1; then
    tail -n 5 "$log" >&2
    fail "installed, but Python cannot import it, see above and $log"
fi

new=$(mktemp "$stamp.XXXXXX")  # not over a file, or through a link, that is there
printf '%s\n' "$root, $venv" "$(stamp_key)" "$extras" >"$new"
mv "$new" "$stamp"
say "ready: . '$venv/bin/activate'"
printf '%s\n' "$venv"
