"""Gradients of the input of strided 1x1 layers, channels first: without the stride, then spread.

Along a dimension with one tap and a stride, only every stride-th position of the input has a
gradient that is not zero. A kernel that computes a tile of results would store single elements,
and zeros between them in other tiles. Here the gradient at those positions is computed as one
without a stride, and a copy at memory bandwidth inserts the zeros (zero_insertion.cu).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.lowering import Lowered, LoweringFamily
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.program import Instance, Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, contiguous_strides

__all__ = ["ZeroInsertion"]

BLOCK, CHUNK_BYTES = 256, 16
MAX_ELEMENTS = 2**31 - 2**16
# The fewest elements of a result for which a second launch pays. On an H200, in true float32, it
# takes 0.54 to 0.60 of the time of three large gradients, and 0.96 to 1.12 of five smaller ones.
LEAST_ELEMENTS = 2**21
# A copy depends on the size of an element only.
_TYPES = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


ZeroInsertionArgs = structure("conv/zero_insertion.cu", "ZeroInsertionArgs")


class ZeroInsertion(LoweringFamily):
    """bwd_data of ungrouped layers with one tap and a stride along some dimension, in any dtype."""

    name, suffix = "zero_insertion", "spread"
    copy_s = 3.2e-6

    def __init__(
        self,
        families: Sequence[Family[ConvWork]],
        dtypes: Sequence[DType] = DTYPES,
        *,
        least_elements: int = LEAST_ELEMENTS,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        families
            Compute the gradient without the stride.
        dtypes
            Those that it takes.
        least_elements
            The fewest elements of a result.
        """
        super().__init__(families)
        self._dtypes, self._least = dtypes, least_elements

    def lowered(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        if work.direction != "bwd_data" or work.groups != 1:
            return f"{work.direction} of {work.groups} groups"
        if work.dtype not in self._dtypes or work.precision == "high":
            return f"{work.dtype.value}, {work.precision} precision: not measured"
        if not work.epilogue_free or work.result_dtype is not work.dtype:
            return "an epilogue"
        spreads = [k == 1 < s for k, s in zip(work.conv.kernel_size, work.conv.stride, strict=True)]
        if not any(spreads):
            return "no dimension with one tap and a stride"
        extents = work.batch, work.in_channels, *work.input
        strides = work.x.strides[0], *work.x.strides[2:]
        each = zip(extents, strides, contiguous_strides(extents), strict=True)
        if any(extent > 1 and stride != wanted for extent, stride, wanted in each):
            return "the result is not contiguous, channels first"
        elements = work.batch * work.in_channels * prod(work.input)
        if not self._least <= elements <= MAX_ELEMENTS:
            return f"a result of {elements} elements"
        conv = work.conv
        conv = replace(
            conv,
            input_size=_instead(spreads, conv.input_size, conv.output_size),
            stride=_instead(spreads, conv.stride, (1,) * conv.ndim),
            padding=_instead(spreads, conv.padding, ((0, 0),) * conv.ndim),
        )
        buffer = f"{work.prefix}{work.direction}.without_zeros"
        found = replace(work, conv=conv, follows=False, leads=False)
        n, c, d, h, w = contiguous_strides((work.batch, work.in_channels, *found.input))
        found = replace(found, x=replace(work.x, buffer=buffer, strides=(n, n, c, d, h, w)))
        size = work.batch * work.in_channels * prod(found.input) * work.dtype.itemsize
        return Lowered(found, (), (Workspace(buffer, size),))

    def after(
        self, work: ConvWork, device: CudaDevice, lowered: Lowered, last: Step
    ) -> Iterable[Step]:
        args = ZeroInsertionArgs()
        args.elements = work.batch * work.in_channels * prod(work.input)
        args.size[:], args.extent[:] = work.input, lowered.work.input
        same = [a == b for a, b in zip(work.stride, lowered.work.stride, strict=True)]
        args.step[:] = _instead(same, work.stride, (1, 1, 1))
        args.pad[:] = _instead(same, work.pad, (0, 0, 0))
        for dim in range(3):
            args.by[dim], args.by_step[dim] = divider(args.size[dim]), divider(args.step[dim])
        chunks = ceil_div(args.elements * work.dtype.itemsize, CHUNK_BYTES)
        return (
            Launch(
                _instance(work.dtype.itemsize),
                linear_grid(chunks, BLOCK),
                (BLOCK, 1, 1),
                pack(args, source=lowered.work.x, target=work.x),
                overlaps=isinstance(last, Launch) and device.capability >= OVERLAPPING,
            ),
        )

    def instances(self) -> Iterable[Instance]:
        sizes = {dtype.itemsize for dtype in self._dtypes}
        return [*super().instances(), *map(_instance, sorted(sizes))]


def _instance(itemsize: int) -> Instance:
    return Instance.of("conv/zero_insertion.cu", ELEMENT=_TYPES[itemsize])


def _instead(chosen: Sequence[bool], kept: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``kept``, with elements of ``other`` where ``chosen``."""
    each = zip(chosen, kept, other, strict=True)
    return tuple(b if instead else a for instead, a, b in each)
