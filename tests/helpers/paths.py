"""Folders and scripts of the checkout that tests use."""

from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent

ENRO = TESTS / "data" / "enro"
"""English and Romanian text."""

GOLDEN = TESTS / "golden"
"""Numbers of the published code."""

REFERENCE = TESTS / "reference_checkpoint"
"""A model that the published code trained, with its data."""
