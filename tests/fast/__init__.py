"""Tests of ``surface_fusion.fast``; a package, since some files are named like those of the one above."""
