#!/usr/bin/env bash
# Installs everything (scripts/setup.sh) and runs all checks: ruff, mypy, the import rules and the tests.
#
#   scripts/test.sh [PYTEST_ARGUMENT...]      for example: scripts/test.sh tests/config -k yaml
set -euo pipefail

scripts=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$("$scripts/setup.sh" plot test)
cd "$scripts/.."
export PATH=$venv/bin:$PATH
export OMP_NUM_THREADS=1 # the models are tiny: more threads slow them down

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
# One process per core, at most 4 (each loads torch); the tests of a file share fixtures, so one process runs them.
check pytest -n auto --maxprocesses=4 --dist loadfile "$@"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
