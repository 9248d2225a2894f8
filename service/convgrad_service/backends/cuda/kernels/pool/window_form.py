"""The form of poolings that kernels compute: contiguous tensors of at most three pooled axes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Check, Clear, Fragment, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["MIXED", "MOVED", "SMALL", "FromIndices", "WindowForm", "covered", "most_positions"]
__all__ += ["widths", "window_args", "window_grid"]

Axes = tuple[WindowAxis, ...]
C = TypeVar("C")
LARGEST = 2**31 - 1
BAD_INDEX = (
    "indices has an index that is out of its plane or outside its window; expected the indices of "
    "a max pooling of this geometry"
)
# Of elements that are moved and not computed with, by their size.
MOVED = {dtype.itemsize: dtype for dtype in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)}
# Of elements for which kernels have instances of particular windows. Those of float64 are for any.
SMALL = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
# Types of x and y where poolings in stages add up gradients of a 16-bit type in float32.
MIXED = tuple(
    pair
    for half in (DType.FLOAT16, DType.BFLOAT16)
    for pair in ((half, DType.FLOAT32), (DType.FLOAT32, half))
)
ONE = WindowAxis.sliding(1, 1, 1, 1, 0)


WindowRange: Any = structure("pool/windows.cuh", "WindowRange")
WindowArgs: Any = structure("pool/windows.cuh", "WindowArgs")


def range_of(axis: WindowAxis) -> Any:
    """Return the kernels' form of the windows along an axis."""
    unit = axis.unit
    whole, step = divmod(axis.step, unit)
    found = WindowRange(whole, step, axis.first, axis.last, axis.low, axis.high, divider(unit))
    if axis.output * step + max(abs(axis.first), abs(axis.last)) > LARGEST:
        # Like a Divider, in 64 bits.
        log = (unit - 1).bit_length()
        found.wide_factor, found.wide_shift = ceil_div(2 ** (63 + log), unit), log - 1
    return found


@dataclass(frozen=True, slots=True)
class WindowForm:
    """x is [batch, x_size, inner], y and indices [batch, y_size, inner].

    ``last`` is whether adjacent threads compute adjacent elements of ``inner``. It decides the
    order of additions, so it depends on the layout and the windows, not on the channel count.
    ``varying`` is the side whose window sizes divide if there is no common ``divisor``.
    """

    batch: int
    inner: int
    last: bool
    windows: Axes
    counted: Axes
    divisor: float
    varying: str | None
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, work: WindowWork) -> WindowForm:
        batch, inner = work.batch, work.channels
        if not work.channels_last:
            batch, inner = batch * inner, 1
        axes = list(zip(work.windows, work.counted or (ONE,) * len(work.windows), strict=True))
        divisor, varying = _divisor(work)
        last, dilation = work.channels_last, work.dilation or (1,) * len(axes)
        if work.kind == "sums":  # indices refer to whole planes
            while axes and axes[-1][0].is_identity:
                inner *= axes.pop()[0].input
                last = True
            while axes and axes[0][0].is_identity:
                batch *= axes.pop(0)[0].input
            if not axes and batch * inner <= LARGEST - 2**16:
                batch, inner = 1, batch * inner
        if set(dilation) <= {1}:
            axes = _merged(axes)
            dilation = (1,) * len(axes)
        axes = [(ONE, ONE)] * (3 - len(axes)) + axes
        dilation = (1,) * (3 - len(dilation)) + dilation
        windows, counted = (tuple(side) for side in zip(*axes, strict=True))
        return cls(batch, inner, last, windows, counted, divisor, varying, dilation)

    @property
    def x_size(self) -> tuple[int, ...]:
        return tuple(axis.input for axis in self.windows)

    @property
    def y_size(self) -> tuple[int, ...]:
        return tuple(axis.output for axis in self.windows)

    @property
    def dilated(self) -> bool:
        """Whether only some positions of a window count."""
        return set(self.dilation) != {1}

    @property
    def most_window(self) -> int:
        """An upper bound of the positions of a window."""
        return prod(map(most_positions, self.windows))

    @property
    def overlap(self) -> float:
        """The average number of windows that contain a position of x."""
        return prod(axis.valid_taps / axis.input for axis in self.windows)

    @property
    def one_line(self) -> bool:
        """Whether windows have positions along the last axis only."""
        return self.x_size[:2] == (1, 1)

    def is_simple(self, *sides: Axes) -> bool:
        """Whether planes have one slice, and windows of these sides slide by whole positions."""
        flat = self.x_size[0] == self.y_size[0] == 1
        return flat and all(axis.unit == 1 for side in sides for axis in side)

    def width(self, *dtypes: DType) -> int:
        """Return the elements of a thread along ``inner``, one of `widths`."""
        inner = self.inner if self.last else 1
        return next(width for width in widths(*dtypes) if inner % width == 0)

    def why_not(self, width: int = 1) -> str | None:
        """Return why the kernels' 32-bit numbers do not suffice; None if they do.

        Threads have ``width`` elements of ``inner``.
        """
        if prod(self.x_size) > LARGEST or prod(self.y_size) > LARGEST:
            return f"a plane of more than {LARGEST} positions"
        if max(self.batch, self.inner, prod(self.y_size) * self.inner // width) > LARGEST:
            return f"more than {LARGEST} images, channels or vectors of an image"
        return None


def _divisor(work: WindowWork) -> tuple[float, str | None]:
    """Return the divisor of all windows, or 1 and the side whose window sizes divide."""
    if work.divisor is not None:
        return float(work.divisor), None
    sizes = [axis.uniform_size for axis in work.counted]
    if any(size is None for size in sizes):
        return 1.0, work.by
    return float(prod(size for size in sizes if size is not None)), None


def _merged(axes: list[tuple[WindowAxis, WindowAxis]]) -> list[tuple[WindowAxis, WindowAxis]]:
    """Merge adjacent axes with one window of everything, or with one position in every window."""
    merged: list[tuple[WindowAxis, WindowAxis]] = []
    for axis, counted in axes:
        if merged:
            before, counted_before = merged[-1]
            sizes = counted_before.uniform_size, counted.uniform_size
            count = prod(size or 0 for size in sizes)
            whole = before.is_whole and axis.is_whole
            if count and (whole or (before.is_broadcast and axis.is_broadcast)):
                extents = before.input * axis.input, before.output * axis.output
                merged[-1] = _all_of(*extents), _all_of(count, 1)
                continue
        merged.append((axis, counted))
    return merged


def _all_of(input: int, output: int) -> WindowAxis:
    """Return windows that all contain every position."""
    return WindowAxis(
        input=input,
        output=output,
        step=0,
        first=0,
        last=input,
        unit=1,
        low=0,
        high=input,
        taps=input * output,
        valid_taps=input * output,
    )


def most_positions(axis: WindowAxis) -> int:
    """Return an upper bound of the size of a window along an axis."""
    found = axis.uniform_size or ceil_div(axis.last - axis.first, axis.unit)
    return max(1, min(axis.input, found))


def covered(axis: WindowAxis, outputs: int) -> int:
    """Return an upper bound of the positions in all windows of adjacent outputs."""
    reach = (outputs - 1) * axis.step + axis.last - axis.first
    return max(1, min(axis.input, ceil_div(reach, axis.unit)))


def widths(*dtypes: DType) -> tuple[int, ...]:
    """Return the elements in vectors of at most 16 bytes, of at least 4, and one."""
    sizes = [dtype.itemsize for dtype in dtypes]
    return tuple(dict.fromkeys((CHUNK_BYTES // max(sizes), max(1, 4 // min(sizes)), 1)))


def window_args(form: WindowForm, width: int, items: Sequence[int]) -> Any:
    """Return the arguments of a launch.

    Threads have ``width`` elements along ``inner``; there are ``items`` of them along y's axes.
    """
    args = WindowArgs()
    args.window[:] = [range_of(axis) for axis in form.windows]
    args.counted[:] = [range_of(axis) for axis in form.counted]
    args.by_items[:] = [divider(count) for count in items]
    args.x_size[:], args.y_size[:] = form.x_size, form.y_size
    args.x_plane, args.inner, args.batch = prod(form.x_size), form.inner, form.batch
    vectors = form.inner // width
    args.by_vectors = divider(vectors)
    each = vectors * prod(items)
    # Leave room for the last threads of blocks.
    args.chunk = max(1, min(form.batch, (LARGEST - 2**16) // each))
    args.threads = args.chunk * each
    args.dilation[:], args.dilated = form.dilation, form.dilated
    args.by_outputs = form.varying == "outputs"
    args.divisor, args.reciprocal = form.divisor, 1.0 / form.divisor
    return args


class FromIndices(Solver[WindowWork, C]):
    """Gradients of max pooling from indices; with ``moves``, the launch of a max unpooling, which
    moves elements to positions instead of adding them there."""

    def __init__(self, *, moves: bool = False) -> None:
        self._moves = moves

    @abstractmethod
    def launch(self, work: WindowWork, device: CudaDevice, config: C, bad: str | None) -> Launch:
        """Return the launch.

        ``bad`` is a buffer of int64 numbers that are 0 before. An index that is not in its window
        sets the first, or the second with ``moves``.
        """

    def fragment(self, work: WindowWork, device: CudaDevice, config: C) -> Fragment:
        bad = f"{work.prefix}bad_index" if work.checked else None
        launch = self.launch(work, device, config, bad)
        if bad is None or self._moves:
            return Fragment(self.name, (launch,))
        steps = Clear(bad, 8), launch
        return Fragment(self.name, steps, (Workspace(bad, 8),), (Check(bad, BAD_INDEX),))


def window_grid(args: Any, a_block: int) -> tuple[int, int, int]:
    """Return the grid: blocks of a chunk, and chunks."""
    return ceil_div(args.threads, a_block), ceil_div(args.batch, args.chunk), 1
