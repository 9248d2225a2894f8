"""GPU plans: from a problem to launches over named buffers."""
