"""``python -m surface_fusion``: same as the command ``surface-fusion``."""

import sys

from surface_fusion.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
