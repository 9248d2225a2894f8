"""The gradient of max pooling from indices, channels last, of 3x3 windows with a stride of 2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    FromIndices,
    WindowForm,
    divider_of,
    range_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["RouteStrips"]

BLOCK = 64
# Three layers with a stride of 1 took 0.65 to 0.73 of the time by `window_routes`.
KERNEL, STRIDE = 3, 2
# Rows of a thread.
ROWS = 2
# Channels of a thread, by the size of an element.
WIDTHS = {2: (4, 1), 4: (4, 1), 8: (2, 1)}
# Of a plane, so that their numbers are far from those of positions that do not exist.
MOST_POSITIONS = 2**30 - 2**16
# Threads that keep a multiprocessor busy, and the fewest windows of a strip.
ENOUGH_THREADS, LEAST_STRIP = 2048, 7


StripArgs: Any = structure("pool/route_strips.cu", "StripArgs")


@dataclass(frozen=True, slots=True)
class Strips:
    """``strips`` of ``strip`` windows along W, for each of ``tiles`` along H."""

    form: WindowForm
    width: int
    tiles: int
    strips: int
    strip: int

    @property
    def threads(self) -> int:
        form = self.form
        lines = form.batch * form.y_size[0] * self.tiles
        return lines * self.strips * (form.inner // self.width)


class RouteStrips(FromIndices[Strips]):
    """The gradient of max pooling from indices, channels last, of 3x3 windows two apart."""

    name = "route_strips"

    def solve(self, work: WindowWork, device: CudaDevice) -> Strips | str:
        if work.kind != "routes" or work.x_dtype not in (None, work.dtype):
            return "no gradient of maxima of one type"
        form = WindowForm.of(work)
        if not form.last or form.dilated:
            return "channels first, or dilated"
        if not form.windows[0].is_identity:
            return "windows of several slices"
        if any(not _slides(axis) for axis in form.counted[1:]):
            return f"windows that are not {KERNEL} x {KERNEL}, {STRIDE} apart"
        widths = WIDTHS[work.dtype.itemsize]
        width = next(width for width in widths if form.inner % width == 0)
        lines, columns = (
            ceil_div(size - axis.first, step)
            for size, axis, step in zip(
                form.y_size[1:], form.counted[1:], (ROWS, STRIDE), strict=True
            )
        )
        whole = Strips(form, width, lines, 1, columns)
        wanted = ceil_div(ENOUGH_THREADS * device.multiprocessors, whole.threads)
        strip = max(min(LEAST_STRIP, columns), ceil_div(columns, wanted))
        found = Strips(form, width, lines, ceil_div(columns, strip), strip)
        if ceil_div(found.threads, BLOCK) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        if prod(form.y_size) > MOST_POSITIONS:
            return f"planes of more than {MOST_POSITIONS} positions"
        return form.why_not(width) or found

    def launch(
        self, work: WindowWork, device: CudaDevice, config: Strips, bad: str | None
    ) -> Launch:
        form, args = config.form, StripArgs()
        args.x_size[:], args.y_size[:] = form.x_size, form.y_size
        args.window, args.counted = range_of(form.windows[0]), range_of(form.counted[0])
        args.by_plane = divider_of(prod(form.y_size[1:]))
        args.pad[:] = [-axis.first for axis in form.counted[1:]]
        args.wide_indices = work.index_dtype is DType.INT64
        args.inner, args.threads = form.inner, config.threads
        args.tiles, args.strips, args.strip = config.tiles, config.strips, config.strip
        return Launch(
            _instance(work.dtype, config.width),
            linear_grid(config.threads, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
        )

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype, width) for dtype in FLOATING for width in WIDTHS[dtype.itemsize]]


def _slides(axis: WindowAxis) -> bool:
    """Whether windows slide by ``STRIDE`` and have ``KERNEL`` positions, padding included."""
    return (
        axis.unit == 1
        and axis.step == STRIDE
        and axis.last - axis.first == KERNEL
        and axis.first <= 0
    )


def _instance(dtype: DType, width: int) -> Instance:
    return Instance.of(
        "pool/route_strips.cu",
        ELEMENT=dtype,
        WIDTH=width,
        KERNEL=KERNEL,
        STRIDE=STRIDE,
        ROWS=ROWS,
    )
