"""Maxima of windows and their positions, a thread for each window."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
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

__all__ = ["WindowMaxima"]

BLOCK = 128
# Positions of a window along its last two axes that are loaded at once; the first that fits.
LOADED = ((1, 4), (2, 2), (3, 3), (4, 4))
ANY = (0, 0)
# Of windows each of whose lines is reduced once, positions of a thread, and threads that keep a
# multiprocessor busy.
LINES, RUNS, ENOUGH_THREADS = 3, (28, 14, 7, 4), 768
# Their elements of `inner`.
SLIDING_WIDTHS = (4, 1)


class WindowMaxima(Solver[WindowWork, WindowForm]):
    """Maxima of windows of any kind."""

    name = "window_maxima"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "maxima":
            return "no maxima"
        form = WindowForm.of(work)
        return form.why_not(form.width(work.dtype)) or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        slides, width, run = _slides(work, form), form.width(work.dtype), 1
        if slides:
            width = next(width for width in SLIDING_WIDTHS if form.inner % width == 0)
            run = _run(form, width, device)
        args = window_args(
            form, width, (form.y_size[0], ceil_div(form.y_size[1], run), form.y_size[2])
        )
        args.run = run
        args.wide_indices = work.index_dtype is DType.INT64
        launch = Launch(
            _instance(work.dtype, width, _loaded(work.dtype, form), slides),
            window_grid(args, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, carried=work.carried),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, width, loaded, slides)
            for dtype in FLOATING
            for loaded in ((*LOADED, ANY) if dtype in SMALL else (ANY,))
            for slides in ((False, True) if loaded == (LINES, LINES) else (False,))
            for width in (SLIDING_WIDTHS if slides else widths(dtype))
        ]


def _loaded(dtype: DType, form: WindowForm) -> tuple[int, int]:
    if form.dilated or not form.last or dtype not in SMALL:
        return ANY
    rows, columns = map(most_positions, form.windows[1:])
    fitting = (size for size in LOADED if rows <= size[0] and columns <= size[1])
    return next(fitting, ANY)


def _slides(work: WindowWork, form: WindowForm) -> bool:
    """Whether windows share lines: three of them, a line apart."""
    along, across = form.windows[1:]
    simple = form.is_simple(form.windows) and along.step == 1 and along.last - along.first == LINES
    return (
        simple
        and across.last - across.first <= LINES
        and _loaded(work.dtype, form) == (LINES, LINES)
    )


def _run(form: WindowForm, width: int, device: CudaDevice) -> int:
    """Return the positions of a thread along axis 1."""
    rows, columns = form.y_size[1:]
    threads = form.batch * columns * (form.inner // width)
    busy = ENOUGH_THREADS * device.multiprocessors
    fitting = (run for run in RUNS if threads * ceil_div(rows, run) >= busy)
    return ceil_div(rows, ceil_div(rows, next(fitting, RUNS[-1])))


def _instance(dtype: DType, width: int, loaded: tuple[int, int], slides: bool) -> Instance:
    rows, columns = loaded
    return Instance.of(
        "pool/window_maxima.cu",
        ELEMENT=dtype,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        SLIDING=slides,
    )
