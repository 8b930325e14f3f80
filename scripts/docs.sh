#!/usr/bin/env bash
# Sets everything up (scripts/setup.sh) and builds the documentation site in runs/site. A broken link fails.
#
#   scripts/docs.sh
set -euo pipefail

scripts=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$("$scripts/setup.sh" docs)
cd "$scripts/.."
"$venv/bin/python" scripts/docs/stage.py runs/docs
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --clean --config-file docs/mkdocs.yml
echo "site: runs/site/index.html"
