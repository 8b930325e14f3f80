"""Analyse a trained model: the figures and tables of ``surface-fusion analyse``."""
