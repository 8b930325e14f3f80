"""The tests mirror the package.

A module y.py of a package x is tested in tests/x/test_y.py, or in a file whose docstring names it. Tests of
several parts together are in ``tests/integration``, shared code in ``tests/helpers``.
"""

import ast
import re
from pathlib import Path

from tests.helpers.paths import ROOT, TESTS

PACKAGE = ROOT / "surface_fusion"
MODULES = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
FILES = {str(path.relative_to(TESTS)): path for path in TESTS.rglob("test_*.py")}
NAMESAKES = {name: name.replace("test_", "", 1) for name in FILES} | {"test_init.py": "__init__.py"}
"""Test files and the modules that they are named after, if these exist."""


def modules_in_docstring(path: Path) -> set[str]:
    """Modules of the package that the docstring of a test file names."""
    named = set(re.findall(r"``([a-z_/]+\.py)``", ast.get_docstring(ast.parse(path.read_text())) or ""))
    assert named <= MODULES, f"{path}: no such module: {named - MODULES}"
    return named


def test_each_module_has_a_test_file() -> None:
    tested = {*NAMESAKES.values()}
    tested |= {module for path in FILES.values() for module in modules_in_docstring(path)}
    missing = {name for name in MODULES - tested if not name.endswith(("__init__.py", "__main__.py"))}
    assert not missing


def test_each_test_file_belongs_to_a_module_or_to_the_integration_tests() -> None:
    others = {
        name
        for name, path in FILES.items()
        if NAMESAKES[name] not in MODULES and not name.startswith(("integration/", "scripts/"))
        if not modules_in_docstring(path)
    }
    assert not others


def test_imports_from_tests_are_absolute() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: {ast.unparse(node)}"
