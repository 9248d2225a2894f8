"""Average pooling and its gradient as sums over windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import FLOATING, DType
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
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowSums"]

BLOCK = 128
# If windows share this many positions along an axis, a thread computes a run of them.
SHARED = 1.25
# (RUN, LINES, TAPS) for windows that are loaded whole (the first that fits is used), for runs that
# are loaded line by line, and for lines of any length.
WHOLE = ((1, 1, 1), (1, 2, 2), (1, 1, 4), (1, 4, 1), (1, 3, 3))
LINES_SHARED = ((4, 1, 3),)
ANY, ANY_SHARED = (1, 0, 0), (4, 0, 0)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a thread computes, see ``window_sums.cu``."""

    width: int
    axis: int
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
        if not form.last:
            chosen = ANY_SHARED if shared else ANY
        elif shared:
            fitting = (choice for choice in LINES_SHARED if taps <= choice[2])
            chosen = next(fitting, ANY_SHARED)
        else:
            whole = (choice for choice in WHOLE if lines <= choice[1] and taps <= choice[2])
            chosen = next(whole, ANY)
        weighted = form.varying == "inputs"
        return cls(form.width(dtype), axis, *chosen, weighted)

    def instance(self, dtype: DType) -> Instance:
        return Instance.of(
            "pool/window_sums.cu",
            {
                "ELEMENT": CUDA_TYPES[dtype],
                "WIDTH": self.width,
                "AXIS": self.axis,
                "RUN": self.run,
                "LINES": self.lines,
                "TAPS": self.taps,
                "WEIGHTED": int(self.weighted),
            },
        )


class WindowSums:
    """Sums over windows of any kind, of images with 32-bit offsets."""

    name = "window_sums"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.kind != "sums":
            return "no average"
        return WindowForm.of(work).why_not()

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        form = WindowForm.of(work)
        shape = _Shape.of(form, work.dtype)
        items = list(form.y_size)
        items[shape.axis] = ceil_div(items[shape.axis], shape.run)
        args = window_args(form, shape.width, items)
        launch = Launch(
            shape.instance(work.dtype),
            window_grid(args, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        first = [(1, 1, run) for run in (ANY, ANY_SHARED)]
        last = [(2, 0, run) for run in (*WHOLE, *LINES_SHARED, ANY, ANY_SHARED)]
        return [
            _Shape(width, axis, *run, weighted).instance(dtype)
            for dtype in FLOATING
            for axis, one, run in (*first, *last)
            for width in ((1,) if one else (CHUNK_BYTES // dtype.itemsize, 1))
            for weighted in (False, True)
        ]
