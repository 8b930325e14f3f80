"""Functions that run plain fairseq, without this package, and return True if it has a fault.

``python -m tests.compat.probes`` runs those that it is given. A probe that would need minutes or a GPU checks
the cause in fairseq's code, and says so.
"""
