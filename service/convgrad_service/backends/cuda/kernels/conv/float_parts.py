"""Float32 tensors as the sums of three bfloat16 parts, for products on tensor cores (float_parts.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import MAX_GRID_YZ
from convgrad_service.backends.cuda.kernels.layout.channels_last import Prepared
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.program import Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides
from convgrad_service.problems.sizes import Size3

__all__ = ["PARTS", "instances", "split_source", "split_weight", "split_s", "why_not_split"]

PARTS = 3
# float_parts.cu: threads of a block, channels of a thread, and the side of a tile.
BLOCK, EIGHT, TILE = 256, 8, 64
MOST_EIGHTS = 2**31 - 1
# A launch, and bytes read and written per second.
LAUNCH_S, BYTES_PER_S = 3e-6, 3.5e12
FloatPartsArgs = structure("conv/float_parts.cu", "FloatPartsArgs")


def split_source(work: ConvWork, *, follows: bool = False) -> Prepared:
    """Return the tensor that a gather reads as parts, each (N, D, H, W, C).

    Parts follow one another, as further images.
    """
    operand = work.sides[0]
    n, _, c, *spatial = operand.strides
    name = f"{work.prefix}source_parts"
    return _split(operand, (work.batch, work.channels[0], work.sizes[0]), (n, c, *spatial), name, 0)


def split_weight(work: ConvWork) -> Prepared:
    """Return the weight as parts, each (K, T, R, S, C); they follow one another along K."""
    _, k, c, *spatial = work.w.strides
    extents = work.out_channels, work.in_channels, work.kernel
    return _split(work.w, extents, (k, c, *spatial), f"{work.prefix}weight_parts", 1)


def why_not_split(work: ConvWork) -> str | None:
    """Return why a gather's operands cannot be split, or None."""
    images = max(work.batch, work.out_channels)
    if images > MAX_GRID_YZ:
        return f"{images} images or channels are more than {MAX_GRID_YZ}"
    eights = max(_padded(work.channels[0]) * work.batch * prod(work.sizes[0]), 1) // EIGHT
    return f"{eights} vectors are more than {MOST_EIGHTS}" if eights > MOST_EIGHTS else None


def split_s(work: ConvWork) -> float:
    """Return the expected seconds of both launches."""
    source = work.batch * prod(work.sizes[0]) * work.channels[0]
    weight = work.in_channels * work.out_channels * work.taps
    return 2 * LAUNCH_S + (source + weight) * 10 / BYTES_PER_S


def instances() -> Iterable[Instance]:
    """Return all instances that splitting uses."""
    return [_instance(False, False), _instance(False, True), _instance(True, False)]


def _padded(channels: int) -> int:
    return ceil_div(channels, EIGHT) * EIGHT


def _split(
    operand: Operand,
    extents: tuple[int, int, Size3],
    strides: tuple[int, ...],
    name: str,
    axis: int,
) -> Prepared:
    """Split a tensor of (images, channels, size) and such strides; ``axis`` of the target's strides
    is that of images."""
    images, channels, size = extents
    args, pixels, padded = FloatPartsArgs(), prod(size), _padded(channels)
    args.stride[:], args.size[:] = strides, size
    args.channels, args.padded, args.pixels = channels, padded, pixels
    args.part = images * pixels * padded
    args.eights = args.part // EIGHT
    args.by_eights, args.by_pixels = divider(padded // EIGHT), divider(pixels)
    for dim, extent in enumerate(size):
        args.by[dim] = divider(extent)
    args.in_order = _in_order(strides[2:], size)
    transposed = strides[1] != 1 and channels > 1
    vectors = not transposed and channels % EIGHT == 0 and all(
        stride % 4 == 0
        for stride, extent in zip((strides[0], *strides[2:]), (images, *size), strict=True)
        if extent > 1
    )
    grid = linear_grid(args.eights, BLOCK)
    if transposed:
        grid = ceil_div(padded, TILE), ceil_div(pixels, TILE), images
    n, d, h, w, c = contiguous_strides((images, *size, padded))
    lead = (n, 0, c) if axis == 0 else (0, n, c)
    target = Operand(name, DType.BFLOAT16, (*lead, d, h, w))
    launch = Launch(
        _instance(transposed, vectors),
        grid,
        (BLOCK, 1, 1),
        pack(args, source=operand, target=target),
    )
    return Prepared(target, (launch,), (Workspace(name, PARTS * args.part * 2),))


def _in_order(strides: tuple[int, ...], size: Size3) -> bool:
    """Return whether the stride of W separates all pixels."""
    step = strides[-1]
    for stride, extent in zip(reversed(strides), reversed(size), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def _instance(transposed: bool, vectors: bool) -> Instance:
    return Instance.of("conv/float_parts.cu", TRANSPOSED=transposed, VECTORS=vectors)
