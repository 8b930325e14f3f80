"""Calls in Python source that run code, unpickle, start processes or fetch files."""

import ast
from collections.abc import Iterator
from pathlib import Path

CALLS = {"eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "execfile"}
CALLS |= {"os.system", "os.popen", "torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load"}
CALLS |= {"yaml.full_load", "torch.hub.load", "hub.load", "importlib.import_module", "tarfile.open"}
CALLS |= {"requests.get", "requests.head", "file_utils.load_archive_file", "instantiate"}
CALL_STARTS = ("pickle.", "subprocess.", "runpy.", "ctypes.cdll.", "os.exec", "os.spawn", "hydra.utils.")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MODULES |= {"subprocess", "pty", "runpy", "ctypes", "cffi", "jsonpickle", "tarfile"}


def calls(root: Path) -> Iterator[tuple[str, str]]:
    """(file, call or import) for each in the tree *root*; paths begin with the name of its last folder."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root.parent).as_posix()
        if "/examples/" not in name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from ((name, found) for node in ast.walk(tree) for found in _found(node))


def _found(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
        yield f"from {node.module} import"
    elif isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        unsafe = any(
            keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False"
            for keyword in node.keywords
        )
        if function in CALLS or function.startswith(CALL_STARTS) or unsafe:
            yield ast.unparse(node)
