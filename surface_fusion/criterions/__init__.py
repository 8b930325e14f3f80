"""The criterion ``fused_label_smoothed_cross_entropy``."""
