#!/usr/bin/env bash
# Runs the fast tests with another Python and another torch, in an environment of their own below runs/.
#
#   scripts/compatibility.sh PYTHON TORCH [PYTEST_ARGUMENT...]     for example: python3.10 2.6.0
#
# Without PYTEST_ARGUMENTs it runs all tests that are not marked slow. docs/development.md lists what was run.
set -euo pipefail

if (($# < 2)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit $(($# < 2 ? 2 : 0))
fi
python=$1 torch=$2
shift 2
scripts=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
cd "$scripts/.."
export SURFACE_FUSION_PYTHON=$python SURFACE_FUSION_TORCH="torch==$torch"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
export SURFACE_FUSION_VENV=$PWD/runs/compatibility/python$version-torch$torch
venv=$("$scripts/setup.sh" plot test)
export PATH=$venv/bin:$PATH OMP_NUM_THREADS=1
(($#)) || set -- -m "not slow"
python -m pytest -q -n auto --maxprocesses=4 --dist loadfile "$@"
