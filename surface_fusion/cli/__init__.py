"""The command ``surface-fusion``: fairseq's commands with this package loaded, and three of our own."""
