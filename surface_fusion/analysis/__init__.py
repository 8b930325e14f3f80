"""Looking inside a trained model: what ``surface-fusion analyse`` draws and tabulates."""
