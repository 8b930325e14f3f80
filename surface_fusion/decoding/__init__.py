"""Incremental decoding and beam search on the device."""
