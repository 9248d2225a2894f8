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
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowMaxima"]

BLOCK = 128
# Positions of a window along its last two axes that are loaded at once; the first that fits.
LOADED = ((1, 4), (2, 2), (3, 3), (4, 4))
ANY = (0, 0)


class WindowMaxima(Solver[WindowWork, WindowForm]):
    """Maxima of windows of any kind."""

    name = "window_maxima"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "maxima":
            return "no maxima"
        form = WindowForm.of(work)
        return form.why_not(form.width(work.dtype)) or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        width = form.width(work.dtype)
        args = window_args(form, width, form.y_size)
        args.wide_indices = work.index_dtype is DType.INT64
        launch = Launch(
            _instance(work.dtype, width, _loaded(work.dtype, form)),
            window_grid(args, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, carried=work.carried),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, width, loaded)
            for dtype in FLOATING
            for loaded in ((*LOADED, ANY) if dtype in SMALL else (ANY,))
            for width in widths(dtype)
        ]


def _loaded(dtype: DType, form: WindowForm) -> tuple[int, int]:
    if form.dilated or not form.last or dtype not in SMALL:
        return ANY
    rows, columns = map(most_positions, form.windows[1:])
    fitting = (size for size in LOADED if rows <= size[0] and columns <= size[1])
    return next(fitting, ANY)


def _instance(dtype: DType, width: int, loaded: tuple[int, int]) -> Instance:
    rows, columns = loaded
    return Instance.of(
        "pool/window_maxima.cu", ELEMENT=dtype, WIDTH=width, ROWS=rows, COLUMNS=columns
    )
