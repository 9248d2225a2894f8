"""Kernel selection and tiling: pure functions that map a problem and a device to a plan."""
