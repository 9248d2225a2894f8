"""Large windows, several threads each: averages, and maxima with indices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    SMALL,
    WindowForm,
    most_positions,
    widths,
    window_args,
    window_grid,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowReduce"]

BLOCK = 256
# With smaller windows one thread per window is faster, for maxima channels first more often; with
# more overlap, sums of lines are.
LEAST_WINDOW, LEAST_OF_MAXIMA = 24, 50
MOST_OVERLAP = 4
# Channels first, the lines of smaller windows are summed in shared memory.
LEAST_OF_LINES = 128
LANES = (8, 16, 32, 256)
LANES_LAST = (8, 16, 32)
# Channels last, maxima of smaller windows have one thread if these are enough for a multiprocessor.
LARGE_WINDOW, BUSY_THREADS = 256, 64


class WindowReduce(Solver[WindowWork, WindowForm]):
    """Averages over large windows with little overlap, and maxima of few of these."""

    name = "window_reduce"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind == "routes":
            return "a gradient of maxima"
        form = WindowForm.of(work)
        if form.varying == "inputs":
            return "a gradient whose windows differ in size"
        if form.dilated:
            return "dilated"
        least = LEAST_OF_MAXIMA if work.kind == "maxima" and not form.last else LEAST_WINDOW
        if form.most_window < least:
            return f"windows of fewer than {least} positions"
        if form.overlap > MOST_OVERLAP:
            return f"positions in more than {MOST_OVERLAP} windows"
        large = form.last or form.one_line or form.most_window > LEAST_OF_LINES
        if not large:
            return f"windows of lines, and at most {LEAST_OF_LINES} positions"
        threads = form.batch * prod(form.y_size) * (form.inner // form.width(work.dtype))
        busy = threads >= BUSY_THREADS * device.multiprocessors
        several = prod(form.y_size) > 1 and form.most_window <= LARGE_WINDOW
        if work.kind == "maxima" and form.last and several and busy:
            return "as many windows as keep the device busy"
        return form.why_not() or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        maxima = work.kind == "maxima"
        along = 1 if maxima else _along(form, work.dtype)
        lanes, width = _lanes(form, along), form.width(work.dtype)
        line = form.one_line and work.dtype in SMALL
        args = window_args(form, width, form.y_size)
        args.lanes_log = _lanes_log(form, lanes, along)
        args.window_log = lanes.bit_length() - 1
        args.wide_indices = work.index_dtype is DType.INT64
        launch = Launch(
            _instance(work.dtype, max(width, along), form.last, line, maxima=maxima),
            window_grid(args, BLOCK // lanes),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, carried=work.carried),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        for dtype in FLOATING:
            wide = CHUNK_BYTES // dtype.itemsize
            along = [2**log for log in range(wide.bit_length())]
            for maxima, line in product((False, True), (False, True)):
                if line and dtype not in SMALL:
                    continue
                for width in (1,) if maxima else along:
                    yield _instance(dtype, width, False, line, maxima=maxima)
                for width in widths(dtype):
                    yield _instance(dtype, width, True, line, maxima=maxima)


def _lanes(form: WindowForm, width: int) -> int:
    """Return the threads of a window: at least eight positions, or vectors of them, for each."""
    choices = LANES_LAST if form.last else LANES
    each = 8 if form.last else 8 * width
    return max([lanes for lanes in choices if each * lanes <= form.most_window] or choices[:1])


def _lanes_log(form: WindowForm, lanes: int, along: int) -> int:
    """Return log2 of the lanes along the last axis with which a lane has the fewest vectors."""
    rows, columns = (
        most_positions(form.windows[1]),
        ceil_div(most_positions(form.windows[2]), along),
    )
    most = min(lanes.bit_length() - 1, (columns - 1).bit_length())

    def vectors(log: int) -> int:
        return ceil_div(columns, 2**log) * ceil_div(rows, lanes >> log)

    return min(range(most, -1, -1), key=vectors)


def _along(form: WindowForm, dtype: DType) -> int:
    """Return the positions of a vector load along the last axis, channels first.

    Windows must start and end at multiples of it.
    """
    axis, width = form.windows[2], CHUNK_BYTES // dtype.itemsize
    if form.last or axis.unit != 1 or axis.first != 0 or axis.uniform_size is None:
        return 1
    while any(extent % width for extent in (axis.input, axis.step, axis.uniform_size)):
        width //= 2
    return width


def _instance(dtype: DType, width: int, last: bool, line: bool, *, maxima: bool) -> Instance:
    return Instance.of(
        "pool/window_reduce.cu",
        ELEMENT=dtype,
        WIDTH=width,
        INNER=last,
        LINE=line,
        MAXIMA=maxima,
    )
