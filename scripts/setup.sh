#!/usr/bin/env bash
# Installs everything in a virtual environment inside the clone; does nothing if it is installed already.
#
#   scripts/setup.sh [EXTRA...]      extras of pyproject.toml: bpe, docs, plot, test
#
# Prints a line for each step (stderr), then the environment's folder (stdout).
#
# SURFACE_FUSION_PYTHON  the Python to use (default: the first of python3, python3.12, ... that is supported)
# SURFACE_FUSION_VENV    folder of the environment (default: .venv in the clone); may be an existing environment
# SURFACE_FUSION_TORCH   the torch to install, in pip's syntax (default: an installed torch >= 2.6, otherwise
#                        torch==2.13.0)
#
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) select the package index, and thus a
# CPU or a CUDA build of torch.
set -euo pipefail

tested_torch="torch==2.13.0"
supported="3.11 and 3.12 (Linux x86_64: wheels only), 3.10 and 3.13 (and other machines: with a C++ compiler)"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

# version_of COMMAND: print the version of a Python; nothing if COMMAND is not a Python.
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }

# has_torch PYTHON: whether it has a torch >= 2.6, by its metadata (importing torch takes seconds).
has_torch() {
    "$1" - 2>/dev/null <<'PY'
import re
from importlib.metadata import version
raise SystemExit([int(n) for n in re.findall(r"\d+", version("torch"))[:2]] < [2, 6])
PY
}

# Print the Python to use; prefer versions for which all dependencies have wheels.
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
        "Python $version ($python) cannot create virtual environments: it lacks venv or ensurepip" \
        "(Debian, Ubuntu: apt-get install python3-venv)"
    # The new environment can use a torch of the system, but not one of another virtual environment.
    if [[ -z ${SURFACE_FUSION_TORCH:-} ]] && has_torch "$python" \
        && "$python" -c 'import sys; raise SystemExit(sys.prefix != sys.base_prefix)'; then
        options=(--system-site-packages)
    fi
    say "creating $venv with Python $version${options:+, keeping its torch}"
    "$python" -m venv ${options[@]+"${options[@]}"} "$venv" >&2 || fail "could not create $venv, see above"
}

# install NAME PIP_ARGUMENT...: install with pip, which writes to the log; on failure, print the log's end.
install() {
    say "installing $1"
    shift
    "$py" -m pip install --no-input --disable-pip-version-check "$@" >>"$log" 2>&1 && return
    tail -n 15 "$log" >&2
    fail "pip install $* failed, see above and $log"
}

# The stamp is valid for one Python, one SURFACE_FUSION_TORCH and one pyproject.toml.
stamp_key() { printf '%s %s %s' "$(version_of "$py")" "${SURFACE_FUSION_TORCH:-}" "$(cksum <"$root/pyproject.toml")"; }

# joined ARGUMENT...: print the distinct, non-empty arguments in alphabetical order, separated by commas.
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
    [[ $extra == bpe || $extra == docs || $extra == plot || $extra == test ]] ||
        fail "there is no extra '$extra'; choose from bpe, docs, plot, test"
done
extras=$(joined "$@")

mkdir -p "$venv" 2>/dev/null || fail "cannot create the folder $venv; set SURFACE_FUSION_VENV to another one"
if command -v flock >/dev/null; then # wait for another setup.sh in the same environment
    exec 9>"$venv/surface-fusion-setup.lock"
    flock 9
fi

if [[ -e $py || -L $py ]]; then
    version=$(version_of "$py")
    [[ -n $version ]] || fail "the Python of $venv does not run; delete that folder and run this again"
    [[ $version =~ ^3\.1[0-3]\. ]] || fail "$venv has Python $version; supported: $supported"
    if [[ -n ${SURFACE_FUSION_PYTHON:-} ]]; then
        requested=$(version_of "$SURFACE_FUSION_PYTHON")
        [[ ${version%.*} == "${requested%.*}" ]] || fail \
            "$venv has Python $version but SURFACE_FUSION_PYTHON is ${requested:-not a Python};" \
            "delete that folder or set SURFACE_FUSION_VENV to another one"
    fi
fi
if [[ -f $stamp ]]; then
    { read -r paths && read -r key && read -r installed; } <"$stamp"
    # The commands in bin/ contain the path of the environment, and the package is imported from the clone.
    [[ $paths == "$root, $venv" ]] || fail \
        "$venv was set up under another path ($paths); delete that folder and run this again"
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

# torch first: pip's resolver might choose another build.
if [[ -n ${SURFACE_FUSION_TORCH:-} ]]; then
    read -ra request <<<"$SURFACE_FUSION_TORCH"
    install "$SURFACE_FUSION_TORCH" "${request[@]}"
elif ! has_torch "$py"; then
    install "$tested_torch" "$tested_torch"
fi
if ! [[ $version =~ ^3\.1[12]\. && $(uname -sm) == "Linux x86_64" ]]; then
    # There is no wheel of fairseq: compile it with this torch (an isolated build would download another one).
    fairseq=$(grep -oE 'fairseq-fixed==[0-9.]+' "$root/pyproject.toml")
    command -v g++ >/dev/null || command -v c++ >/dev/null || fail \
        "with Python $version on $(uname -sm), $fairseq has to be compiled and there is no C++ compiler" \
        "(Debian, Ubuntu: apt-get install g++)"
    install "what $fairseq is built with" numpy cython "setuptools>=77" wheel
    install "$fairseq (compiles for some minutes)" --no-build-isolation --no-deps "$fairseq"
fi
# The requested torch again: fairseq needs torchaudio, whose newest release would replace it.
read -ra request <<<"${SURFACE_FUSION_TORCH:-}"
(cd "$root" && install "surface-fusion${extras:+ with $extras}" ${request[@]+"${request[@]}"} -e ".${extras:+[$extras]}")
if ! "$py" -c 'import fairseq, surface_fusion' >>"$log" 2>&1; then
    tail -n 5 "$log" >&2
    fail "installed, but Python cannot import it, see above and $log"
fi

new=$(mktemp "$stamp.XXXXXX")
printf '%s\n' "$root, $venv" "$(stamp_key)" "$extras" >"$new"
mv "$new" "$stamp"
say "ready: . '$venv/bin/activate'"
printf '%s\n' "$venv"
