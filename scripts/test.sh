#!/usr/bin/env bash
# Sets everything up (scripts/setup.sh) and runs all checks: ruff, mypy, the import rules and the tests.
#
#   scripts/test.sh [PYTEST_ARGUMENT...]      for example: scripts/test.sh tests/test_golden.py -k soft
set -euo pipefail

scripts=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$("$scripts/setup.sh" plot test)
cd "$scripts/.."
export PATH=$venv/bin:$PATH
export OMP_NUM_THREADS=1 # the models are tiny: threads only get in each other's way

failed=()
check() {
    printf '== %s\n' "$*"
    python -m "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check mypy surface_fusion
printf '== lint-imports\n'
lint-imports || failed+=("lint-imports") # the direction of imports, see pyproject.toml
# A process for each core, no more than 4 (each loads torch); a file's tests stay together and share what they made.
check pytest -n auto --maxprocesses=4 --dist loadfile "$@"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
