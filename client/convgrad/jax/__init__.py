"""JAX: convolution and pooling whose forward and backward passes convgrad computes.

::

    import convgrad.jax

    remote = convgrad.jax.Remote("http://gpu-host:8000")
    y = convgrad.jax.conv_general_dilated(x, w, (1, 1), "SAME", backend=remote)

=======================  =====================================================================
`conv_general_dilated`   as ``jax.lax.conv_general_dilated``, transposed ones too
`max_pool`, `avg_pool`   as ``flax.linen.max_pool`` and ``avg_pool``, channels first too
=======================  =====================================================================

They work under ``jit``, ``grad`` of any order, ``vmap``, ``scan`` and ``checkpoint``; forward-mode
differentiation (``jvp``, ``linearize``) is not supported. They take float16, bfloat16, float32 and
float64.

There are two backends:

`Local`
    The kernels in this process, for GPUs and CPUs, on XLA's memory; the default. Needs the extra
    ``service``, and ``cuda13`` or ``cuda12`` for a GPU.
`Remote`
    A convgrad server, reached by ``jax.pure_callback``: arrays are copied to the host.
"""

from __future__ import annotations

from convgrad.jax._backends import Backend, Local, Remote
from convgrad.jax._conv import conv_general_dilated
from convgrad.jax._pool import avg_pool, max_pool

__all__ = [
    "Backend",
    "Local",
    "Remote",
    "avg_pool",
    "conv_general_dilated",
    "max_pool",
]
