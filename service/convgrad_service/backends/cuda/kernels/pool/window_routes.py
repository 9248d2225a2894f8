"""The gradient of max pooling over windows, from the indices of the maxima."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    WindowForm,
    checked,
    widths,
    window_args,
    window_grid,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import (
    Fragment,
    Instance,
    Launch,
    ceil_div,
)
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowRoutes", "routes", "routes_instances"]

BLOCK = 128
# Adjacent positions of a thread along the last axis.
SPAN = 4


class WindowRoutes:
    """The gradient of max pooling from indices, of images with 32-bit offsets."""

    name = "window_routes"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        if work.kind != "routes":
            return "no gradient of maxima"
        form = WindowForm.of(work)
        return form.why_not(_width(work, form, dilated=form.dilated and work.checked))

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        return checked(work, self.name, lambda bad: routes(work, bad))

    def instances(self) -> Iterable[Instance]:
        return routes_instances(moves=False)


def routes(work: WindowWork, bad: str | None = None, *, moves: bool = False) -> Launch:
    """Return the launch.

    With ``moves`` it moves elements instead of adding them. With ``bad``, int64 numbers that are
    0 before, it counts the windows whose index is not in them: in the first, or the second with
    ``moves``.
    """
    form = WindowForm.of(work)
    # Whether an index that is not a tap must be found.
    dilated = form.dilated and bad is not None
    source, width = work.x_dtype or work.dtype, _width(work, form, dilated=dilated)
    span = 1 if form.windows[2].is_identity or dilated else SPAN
    most = CHUNK_BYTES // work.dtype.itemsize
    store = 1 if form.inner > 1 else gcd(form.y_size[2], span, most)
    args = window_args(form, width, (*form.y_size[:2], ceil_div(form.y_size[2], span)))
    return Launch(
        _instance((source, work.dtype), work.index_dtype, (width, store, span), moves, dilated),
        window_grid(args, BLOCK),
        (BLOCK, 1, 1),
        pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
    )


def _width(work: WindowWork, form: WindowForm, *, dilated: bool) -> int:
    return 1 if dilated else form.width(work.x_dtype or work.dtype, work.dtype)


def routes_instances(*, moves: bool) -> list[Instance]:
    """Return every instance that `routes` uses."""
    # Sums of one stage of a pooling are of wider types than its input.
    dtypes = [(dtype, dtype, index) for dtype in FLOATING for index in INDEX]
    if not moves:
        halves = (DType.FLOAT16, DType.BFLOAT16)
        mixed = [(half, DType.FLOAT32) for half in halves]
        dtypes += [(*pair, DType.INT32) for one in mixed for pair in (one, one[::-1])]
    found = []
    for source, dtype, index in dtypes:
        most = CHUNK_BYTES // dtype.itemsize
        vectors = [(width, 1, span) for width in widths(source, dtype) for span in (1, SPAN)]
        vectors += [(1, store, SPAN) for store in (2, 4) if store <= most]
        found += [_instance((source, dtype), index, vector, moves, False) for vector in vectors]
        if source is dtype and not moves:
            found.append(_instance((source, dtype), index, (1, 1, 1), moves, True))
    return found


def _instance(
    dtypes: tuple[DType, DType],
    index: DType,
    vector: tuple[int, int, int],
    moves: bool,
    dilated: bool,
) -> Instance:
    width, store, span = vector
    return Instance.of(
        "pool/window_routes.cu",
        SOURCE=dtypes[0],
        ELEMENT=dtypes[1],
        INDEX=index,
        WIDTH=width,
        STORE=store,
        SPAN=span,
        MOVE=moves,
        DILATED=dilated,
    )
