"""The gradient of max pooling over windows, from the indices of the maxima."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
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
# Elements of `inner` where x and y have different types, in the stages of a pooling.
STAGE_WIDTHS = (4, 1)


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
        span = SPAN if self._moves else _span(work, form, dilated)
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
        found = []
        for dtype in MOVED.values() if self._moves else FLOATING:
            most = CHUNK_BYTES // dtype.itemsize
            spans = (SPAN,) if self._moves else (1, SPAN)
            vectors = [(width, 1, span) for width in widths(dtype) for span in spans]
            vectors.append((1, min(SPAN, most), SPAN))
            found += [_instance((dtype, dtype), vector, self._moves, False) for vector in vectors]
            if not self._moves:
                found.append(_instance((dtype, dtype), (1, 1, 1), self._moves, True))
        if not self._moves:
            for half in (DType.FLOAT16, DType.BFLOAT16):
                for width in STAGE_WIDTHS:
                    found.append(_instance((half, DType.FLOAT32), (width, 1, 1), False, False))
                    found.append(_instance((DType.FLOAT32, half), (width, 1, SPAN), False, False))
                found.append(_instance((DType.FLOAT32, half), (1, SPAN, SPAN), False, False))
        return found


def _span(work: WindowWork, form: WindowForm, dilated: bool) -> int:
    """Return the adjacent positions of a thread along the last axis."""
    source = work.x_dtype or work.dtype
    if source is not work.dtype:
        # Of a pooling axis by axis: first another axis than the last, to sums of a wider type, and
        # at last the last one, where it has windows.
        return SPAN if source.itemsize > work.dtype.itemsize else 1
    return 1 if form.windows[2].is_identity or dilated else SPAN


def _finds_gaps(work: WindowWork, form: WindowForm) -> bool:
    """Whether an index between the taps of its window must be found."""
    return form.dilated and work.checked


def _width(work: WindowWork, form: WindowForm) -> int:
    if _finds_gaps(work, form):
        return 1
    width = form.width(work.x_dtype or work.dtype, work.dtype)
    mixed = work.x_dtype not in (None, work.dtype)
    return width if not mixed or width in STAGE_WIDTHS else 1


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
