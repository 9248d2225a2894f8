"""Average pooling and its gradient as sums over windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
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
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowSums"]

BLOCK = 128
# If windows share this many positions along an axis, a thread computes a run of them.
SHARED = 1.25
# (LINES, TAPS) of windows that share lines, and of those that are loaded whole; the first that fits
# is used.
SLIDING = ((3, 3), (5, 5))
WHOLE = ((1, 1), (2, 2), (4, 1), (3, 3))
# Those that have an instance for windows that slide by whole positions.
SIMPLE = (3, 3)
# Those with weights; others are rare.
WHOLE_WEIGHTED = ((2, 2),)
# RUN for windows of any size; channels first, they are shared.
ANY, ANY_SHARED = 1, 4
# Positions of a thread that slides, and bytes of x that adjacent threads of a block load.
RUNS = (16, 8, 4)
LINE_BYTES, MOST_LANES = 256, 32
# Threads that keep a multiprocessor busy.
ENOUGH_THREADS = 640


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a thread computes, see ``window_sums.cu``."""

    width: int
    axis: int
    sliding: bool
    simple: bool
    run: int
    lines: int
    taps: int
    weighted: bool

    @classmethod
    def of(cls, form: WindowForm, dtype: DType) -> _Shape:
        axis = 2 if form.last else 1
        along, across = form.windows[axis], form.windows[3 - axis]
        # Planes whose windows do not fit into shared memory have lines of any length.
        shared = along.valid_taps >= SHARED * along.input
        lines, taps = most_positions(along), most_positions(across)
        weighted = form.varying == "inputs"
        whole = WHOLE_WEIGHTED if weighted else WHOLE
        choices = (SLIDING if shared else whole) if form.last and dtype in SMALL else ()
        sizes = next((size for size in choices if lines <= size[0] and taps <= size[1]), (0, 0))
        sliding = shared and sizes != (0, 0)
        simple = sliding and sizes == SIMPLE and form.is_simple(form.windows, form.counted)
        shares = shared and not sliding and not weighted
        run = ANY_SHARED if not form.last or shares else ANY
        return cls(form.width(dtype), axis, sliding, simple, run, *sizes, weighted)

    def instance(self, dtype: DType) -> Instance:
        return Instance.of(
            "pool/window_sums.cu",
            ELEMENT=dtype,
            **macros_of(
                self, "width", "axis", "sliding", "simple", "run", "lines", "taps", "weighted"
            ),
        )


class WindowSums(Solver[WindowWork, WindowForm]):
    """Sums over windows of any kind, of images with 32-bit offsets."""

    name = "window_sums"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "sums":
            return "no average"
        form = WindowForm.of(work)
        return form.why_not() or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        shape = _Shape.of(form, work.dtype)
        if shape.sliding:
            args, grid = _sliding(form, shape.width, work.dtype, device)
        else:
            items = list(form.y_size)
            items[shape.axis] = ceil_div(items[shape.axis], shape.run)
            args = window_args(form, shape.width, items)
            grid = window_grid(args, BLOCK)
        launch = Launch(
            shape.instance(work.dtype), grid, (BLOCK, 1, 1), pack(args, x=work.x, y=work.y)
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        first = (1, False, False, ANY_SHARED, 0, 0)
        for dtype, weighted in product(FLOATING, (False, True)):
            yield _Shape(1, *first, weighted).instance(dtype)
            runs = (ANY,) if weighted else (ANY, ANY_SHARED)
            forms = [(2, False, False, run, 0, 0) for run in runs]
            if dtype in SMALL:
                whole = WHOLE_WEIGHTED if weighted else WHOLE
                forms += [(2, True, False, ANY, *sizes) for sizes in SLIDING]
                forms += [(2, True, True, ANY, *SIMPLE)]
                forms += [(2, False, False, ANY, *sizes) for sizes in whole]
            for form, width in product(forms, widths(dtype)):
                yield _Shape(width, *form, weighted).instance(dtype)


def _sliding(
    form: WindowForm, width: int, dtype: DType, device: CudaDevice
) -> tuple[Any, tuple[int, int, int]]:
    """Return the arguments and the grid of a launch whose threads slide."""
    vectors = form.inner // width
    most = min(MOST_LANES, LINE_BYTES // (width * dtype.itemsize), 1 << (vectors - 1).bit_length())
    lanes = min(most, ceil_div(most, 2), key=lambda lanes: ceil_div(vectors, lanes) * lanes)
    columns, rows = form.y_size[2], prod(form.y_size[:2])
    busy = ENOUGH_THREADS * device.multiprocessors
    threads = form.batch * rows * vectors
    fitting = (run for run in RUNS if threads * ceil_div(columns, run) >= busy)
    runs = ceil_div(columns, next(fitting, RUNS[-1]))
    args = window_args(form, width, (*form.y_size[:2], runs))
    blocks = ceil_div(vectors, lanes)
    args.by_vectors, args.lanes_log = divider(blocks), lanes.bit_length() - 1
    args.run, args.threads = ceil_div(columns, runs), args.chunk * rows
    grid = ceil_div(args.threads, BLOCK // lanes) * runs * blocks
    return args, (grid, ceil_div(form.batch, args.chunk), 1)
