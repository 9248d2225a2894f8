"""`convgrad serve`: settings, the tree of processes, and what they are made of."""
