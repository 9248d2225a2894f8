"""Kernel sources, and beside each the host's side: when it applies, its tiles, its launches.

The host's sides are pure: no GPU and no CuPy.
"""
