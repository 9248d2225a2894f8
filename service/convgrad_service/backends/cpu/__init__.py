"""The CPU backend: the embedded default where there is no GPU."""
