"""The gradient of a bias: kernels/channel_sum.cpp."""

from __future__ import annotations

import threading
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import ConvArgs, view_of
from convgrad_service.backends.cpu.planar_args import CODE_OF
from convgrad_service.backends.cpu.runner import Machine
from convgrad_service.plans.planar import triple

__all__ = ["channel_sum"]

Array = NDArray[Any]
# Limit on the partial sums. Consecutive images share one as needed to stay below it.
SUMS_BYTES = 16 * 1024 * 1024


def channel_sum(
    machine: Machine,
    grad_output: Array,
    grad_bias: Array,
    *,
    cancelled: threading.Event | None = None,
) -> int:
    """Sum grad_output over the batch and all spatial positions.

    Parameters
    ----------
    grad_output : array of shape (N, G, K/G, *spatial)
    grad_bias : array of shape (G, K/G)
        Written. It has the dtype of ``grad_output`` or, for 16-bit types, float32.

    Returns
    -------
    int
        Bytes of workspace used.
    """
    args = ConvArgs()
    args.y, args.bias = view_of(grad_output, 3), view_of(grad_bias)
    args.batch, args.groups, args.out_channels = grad_output.shape[:3]
    args.output[:] = triple(grad_output.shape[3:], 1)
    args.dtype, args.result_dtype = CODE_OF[grad_output.dtype], CODE_OF[grad_bias.dtype]
    workspaces = machine.workers.workspaces
    image_bytes = args.groups * args.out_channels * 8
    images = -(-args.batch // max(1, SUMS_BYTES // image_bytes))
    args.block[0] = images
    sums_bytes = -(-args.batch // images) * image_bytes
    sums = workspaces.take(sums_bytes)
    try:
        args.workspace = sums.address
        machine.workers.launch(machine.library.kernel("channel_sum"), args, cancelled=cancelled)
    finally:
        workspaces.give(sums)
    return int(sums_bytes)
