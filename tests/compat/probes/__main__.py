"""Run probes; read and print JSON.

Input: a list of [name of a probe, owner of the repaired attribute] pairs. Output: a list of booleans.
"""

import inspect
import json
import logging
import sys

from tests.compat.probes import checkpoints, data, generation, processes, text, untrusted_files

MODULES = (checkpoints, data, generation, processes, text, untrusted_files)


def run(probe: str, owner: str) -> bool:
    """Whether plain fairseq has the fault that *probe* looks for."""
    (function,) = (vars(module)[probe] for module in MODULES if probe in vars(module))
    return function(owner) if inspect.signature(function).parameters else function()


def main() -> None:
    """Run the probes of standard input."""
    logging.disable()
    results = [run(*pair) for pair in json.load(sys.stdin)]
    assert "surface_fusion" not in sys.modules
    print(json.dumps(results))


if __name__ == "__main__":
    main()
