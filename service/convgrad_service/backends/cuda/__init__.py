"""The CUDA backend: kernels of our own, compiled at run time and launched through CuPy.

CuPy is imported when a backend is made, not before: the service runs without it. This package
imports nothing itself: a process that does not compute does not load the kernels' planning.
"""
