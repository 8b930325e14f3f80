"""The command ``surface-fusion``: fairseq's commands with this package loaded, and five more verbs."""
