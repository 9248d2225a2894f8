"""The gradient of max pooling over windows, from the indices of the maxima."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    MIXED,
    MOVED,
    FromIndices,
    WindowForm,
    widths,
    window_args,
    window_grid,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowRoutes"]

BLOCK = 128
# Adjacent positions of a thread along the last axis.
SPAN = 4


class WindowRoutes(FromIndices[WindowForm]):
    """The gradient of max pooling from indices, of images with 32-bit offsets."""

    name = "window_routes"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "routes":
            return "no gradient of maxima"
        form = WindowForm.of(work)
        return form.why_not(_width(work, form)) or form

    def launch(
        self, work: WindowWork, device: CudaDevice, config: WindowForm, bad: str | None
    ) -> Launch:
        form, width, dilated = config, _width(work, config), _finds_gaps(work, config)
        span = 1 if form.windows[2].is_identity or dilated else SPAN
        most = CHUNK_BYTES // work.dtype.itemsize
        store = 1 if form.inner > 1 or form.y_size[2] % span else min(span, most)
        dtypes, vector = (work.x_dtype or work.dtype, work.dtype), (width, store, span)
        args = window_args(form, width, (*form.y_size[:2], ceil_div(form.y_size[2], span)))
        args.wide_indices = work.index_dtype is DType.INT64
        return Launch(
            _instance(dtypes, vector, self._moves, dilated),
            window_grid(args, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
        )

    def instances(self) -> Iterable[Instance]:
        dtypes = [(one, one) for one in (MOVED.values() if self._moves else FLOATING)]
        if not self._moves:
            dtypes += MIXED
        found = []
        for source, dtype in dtypes:
            most = CHUNK_BYTES // dtype.itemsize
            vectors = [(width, 1, span) for width in widths(source, dtype) for span in (1, SPAN)]
            vectors.append((1, min(SPAN, most), SPAN))
            found += [_instance((source, dtype), vector, self._moves, False) for vector in vectors]
            if source is dtype and not self._moves:
                found.append(_instance((source, dtype), (1, 1, 1), self._moves, True))
        return found


def _finds_gaps(work: WindowWork, form: WindowForm) -> bool:
    """Whether an index between the taps of its window must be found."""
    return form.dilated and work.checked


def _width(work: WindowWork, form: WindowForm) -> int:
    return 1 if _finds_gaps(work, form) else form.width(work.x_dtype or work.dtype, work.dtype)


def _instance(
    dtypes: tuple[DType, DType],
    vector: tuple[int, int, int],
    moves: bool,
    dilated: bool,
) -> Instance:
    width, store, span = vector
    if moves:
        dtypes = (MOVED[dtypes[0].itemsize],) * 2
    return Instance.of(
        "pool/window_routes.cu",
        SOURCE=dtypes[0],
        ELEMENT=dtypes[1],
        WIDTH=width,
        STORE=store,
        SPAN=span,
        MOVE=moves,
        DILATED=dilated,
    )
