"""Faults that users of fairseq have reported in public, reproduced as reported ("fs" = a fairseq issue).

Others are tested with their module: fs 5036, 2081, 5610, 2867 in tests/compat, fs 4875, 2143, 781 in
test_end_to_end.py, fs 64, 3312 in test_decoder.py and test_model.py, fs 2593, 1758 in test_scoring.py.
"""
