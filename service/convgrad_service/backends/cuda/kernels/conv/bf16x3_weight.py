"""Dense wgrad of float32 (``precision: high``) as three products of bfloat16 parts.

An element is the sum of a high and a low part (bf16_parts.cu), and

    x * y = x.high * y.high + x.high * y.low + x.low * y.high

to 3 * 2^-16 of |x * y|, where TF32 has 2^-10. Over a batch three times as large, whose images are
x's parts (high, high, low) and y's (high, low, high), that is one wgrad in bfloat16 with a float32
result. bfloat16 has float32's range, so nothing is scaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.dense_weight import weight_expected_s
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import Requirements
from convgrad_service.backends.cuda.kernels.layout.channels_last import overlapping, prepare_side
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import (
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides
from convgrad_service.problems.sizes import Size3

__all__ = ["Bf16x3Weight"]

PARTS = 3
# bf16_parts.cu: threads of a block, and 16-byte vectors of a thread.
BLOCK, EACH, VECTOR = 256, 4, 4
MAX_VECTORS = 2**31 - 1
# A launch, and bytes read and written per second.
LAUNCH_S, BYTES_PER_S = 3e-6, 4.1e12
# dense_weight's measured time in TF32 on an H200, over its modelled time: 1.22 to 1.36.
TF32_SLOWER = 1.33
Bf16PartsArgs = structure("conv/bf16_parts.cu", "Bf16PartsArgs")


NEEDS = Requirements((DType.FLOAT32,), tf32=True)


class Bf16x3Weight:
    """bwd_weight of float32 (``precision: high``) on sm_90a, by `HopperWeight`.

    Splitting moves 2.5 times the operands' bytes, so it is for layers of many products.
    """

    name = "bf16x3_weight"

    def __init__(self, product: HopperWeight | None = None, *, everywhere: bool = False) -> None:
        """Create the family.

        Parameters
        ----------
        product
            Computes the bfloat16 products.
        everywhere
            Take work even if TF32 products are expected to be faster.
        """
        self._product, self._everywhere = product or HopperWeight(), everywhere

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        operands = (work.in_channels, work.input), (work.out_channels, work.output)
        vectors = max(work.batch * prod(size) * ceil_div(c, VECTOR) for c, size in operands)
        if vectors > MAX_VECTORS:
            return f"{vectors} vectors of an operand; expected at most {MAX_VECTORS}"
        if (reason := self._product.why_not(_of_parts(work), device)) is not None:
            return reason
        tf32_s = TF32_SLOWER * weight_expected_s(work, device)
        if not self._everywhere and (self.launches(work, device).expected_s or 0.0) > tf32_s:
            return "few products for its size: splitting would cost more than it saves"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        parts = _of_parts(work)
        steps: list[Step] = []
        workspace: list[Workspace] = []
        # The low parts are the last of x's, and the second of y's.
        for name, target, channels, size, low in (
            ("input", parts.x, work.in_channels, work.input, 2),
            ("grad_output", parts.y, work.out_channels, work.output, 1),
        ):
            source = prepare_side(work, name, device)
            steps += overlapping(source.steps, device)
            steps.append(_split(source.operand, target, work.batch, channels, size, low))
            elements = PARTS * work.batch * prod(size) * _padded(channels)
            workspace += source.workspace
            workspace.append(Workspace(target.buffer, elements * target.dtype.itemsize))
        moved = sum(item.size_bytes for item in workspace) * 10 // 6
        split_s = len(steps) * LAUNCH_S + moved / BYTES_PER_S
        product = self._product.launches(parts, device)
        return replace(
            product,
            kernel=f"{self.name}_{product.kernel}",
            steps=(*steps, *product.steps),
            workspace=(*workspace, *product.workspace),
            expected_s=None if product.expected_s is None else product.expected_s + split_s,
        )

    def instances(self) -> Iterable[Instance]:
        return [_instance(), *self._product.instances()]


def _of_parts(work: ConvWork) -> ConvWork:
    """Return the work on the parts of the operands."""
    conv = replace(work.conv, batch=PARTS * work.batch)
    x, y = (
        _part_operand(f"{work.prefix}{name}_parts", conv.batch, channels, size)
        for name, channels, size in (
            ("input", work.in_channels, work.input),
            ("grad_output", work.out_channels, work.output),
        )
    )
    # Copies of the parts are not copies of the operands, which another work may share.
    prefix = f"{work.prefix}parts_"
    return replace(work, conv=conv, dtype=DType.BFLOAT16, x=x, y=y, prefix=prefix)


def _padded(channels: int) -> int:
    """Return the channels of a pixel of the parts: whole 16-byte chunks."""
    return ceil_div(channels, 8) * 8


def _part_operand(name: str, batch: int, channels: int, size: Size3) -> Operand:
    n, d, h, w, c = contiguous_strides((batch, *size, _padded(channels)))
    return Operand(name, DType.BFLOAT16, (n, 0, c, d, h, w))


def _split(
    source: Operand, target: Operand, batch: int, channels: int, size: Size3, low: int
) -> Launch:
    """Return the launch that splits a channels-last operand."""
    args, pixels = Bf16PartsArgs(), batch * prod(size)
    strides = source.strides[0], *source.strides[3:]
    args.stride[:], args.size[:] = strides, size
    args.chunks, args.padded, args.low = ceil_div(channels, VECTOR), _padded(channels), low
    args.vectors, args.part = pixels * args.chunks, pixels * args.padded
    args.by_chunks = divider(args.chunks)
    args.in_order = _in_order(strides, (batch, *size))
    for dim, extent in enumerate(size):
        args.by[dim] = divider(extent)
    grid = linear_grid(ceil_div(args.vectors, EACH), BLOCK)
    return Launch(_instance(), grid, (BLOCK, 1, 1), pack(args, source=source, target=target))


def _in_order(strides: tuple[int, ...], extents: tuple[int, ...]) -> bool:
    """Return whether one stride, the last, separates all pixels."""
    step = strides[-1]
    for stride, extent in zip(reversed(strides), reversed(extents), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def _instance() -> Instance:
    return Instance.of("conv/bf16_parts.cu", HOPPER)
