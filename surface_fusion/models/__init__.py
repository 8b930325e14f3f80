"""``transformer_surface_fusion``: the model, its encoder, decoder and named architectures."""
