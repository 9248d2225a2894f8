"""Maxima of small windows and their positions: several windows per thread."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    WindowForm,
    most_positions,
    window_args,
    window_grid,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowMaxima"]

BLOCK = 128
# Positions of a window along its last two axes, and planes of a thread with channels first, to have
# more loads in flight; the first entry that fits is used.
SMALL = ((1, 4, 4), (2, 2, 4), (3, 3, 2), (4, 4, 1))


class WindowMaxima:
    """Maxima of windows of at most 4 by 4 positions."""

    name = "window_maxima"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.kind != "maxima":
            return "no maxima"
        form = WindowForm.of(work)
        if _small(form) is None:
            return "windows of more than 4 by 4 positions"
        return form.why_not()

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        form = WindowForm.of(work)
        rows, columns, planes = _small(form) or SMALL[-1]
        planes = 1 if form.last else planes
        width = form.width(work.dtype)
        args = window_args(form, width, form.y_size, planes)
        launch = Launch(
            _instance(work.dtype, work.index_dtype, width, rows, columns, planes),
            window_grid(args, planes, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, index, width, rows, columns, planes)
            for dtype in FLOATING
            for index in INDEX
            for rows, columns, most in SMALL
            for width, planes in dict.fromkeys(
                ((CHUNK_BYTES // dtype.itemsize, 1), (1, 1), (1, most))
            )
        ]


def _small(form: WindowForm) -> tuple[int, int, int] | None:
    rows, columns = map(most_positions, form.windows[1:])
    fitting = (small for small in SMALL if rows <= small[0] and columns <= small[1])
    return next(fitting, None)


def _instance(
    dtype: DType, index: DType, width: int, rows: int, columns: int, planes: int
) -> Instance:
    return Instance.of(
        "pool/window_maxima.cu",
        {
            "ELEMENT": CUDA_TYPES[dtype],
            "INDEX": CUDA_TYPES[index],
            "WIDTH": width,
            "ROWS": rows,
            "COLUMNS": columns,
            "PLANES": planes,
        },
    )
