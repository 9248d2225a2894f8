"""The argument of the gather kernels, ``gather_args.cuh``."""

from __future__ import annotations

from collections.abc import Sequence

from convgrad_service.backends.cuda.arguments import Packed, fill, pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["gather_args"]


GatherArgs = structure("fallback/gather_args.cuh", "GatherArgs")


def gather_args(work: ConvWork, lanes: int, phases: Sequence[int]) -> Packed:
    """Return the kernel's argument for a fwd or bwd_data."""
    backward = work.direction == "bwd_data"
    source, result = work.sides
    args = GatherArgs()
    args.x_stride[:], args.y_stride[:] = source.strides, result.strides
    if work.accumulate is not None:
        args.accumulate_stride[:] = work.accumulate.strides
    group, k, c, *kernel = work.w.strides
    # The result's channels come first: K forward, C backward.
    args.w_stride[:] = (group, c, k, *kernel) if backward else (group, k, c, *kernel)
    args.batch, args.groups = work.batch, work.groups
    args.in_channels, args.out_channels = work.channels
    args.x_size[:], args.y_size[:] = work.sizes
    fill(args, work, "alpha", "beta", "kernel", "stride", "dilation", "pad")
    args.phases[:] = phases
    args.backward, args.activation = backward, ACTIVATIONS[work.activation]
    args.lanes = lanes
    return pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias)
