"""Layers, and functions of layers, that encoder and decoder are built from."""
