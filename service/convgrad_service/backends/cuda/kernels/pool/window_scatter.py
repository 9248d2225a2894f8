"""The gradient of max pooling from indices, and max unpooling, channels first."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.pool.window_box import BOX_BLOCK, Tile, why_no_tile
from convgrad_service.backends.cuda.kernels.pool.window_form import WindowForm, checked
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowScatter", "scatter"]


class WindowScatter:
    """The gradient of max pooling from indices, channels first, through shared memory."""

    name = "window_scatter"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        if work.kind != "routes":
            return "no gradient of maxima"
        if work.x_dtype not in (None, work.dtype):
            return "sums of another type"
        form = WindowForm.of(work)
        return why_no_tile(work, form, device) or form.why_not()

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        return checked(work, self.name, lambda bad: scatter(work, device, bad))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, index, simple, moves)
            for dtype in FLOATING
            for index in INDEX
            for simple in (True, False)
            for moves in (False, True)
        ]


def scatter(
    work: WindowWork, device: CudaDevice, bad: str | None = None, *, moves: bool = False
) -> Launch:
    """Return the launch.

    With ``moves`` it moves elements instead of adding them. With ``bad``, int64 numbers that are
    0 before, it sets the first, or the second with ``moves``, if an index is not in its window.
    """
    form = WindowForm.of(work)
    tile = Tile.of(work, form, device)
    if tile is None:
        raise ValueError("windows that do not fit into shared memory")
    return Launch(
        _instance(work.dtype, work.index_dtype, form.is_simple(form.counted), moves),
        (tile.blocks(form), 1, 1),
        (BOX_BLOCK, 1, 1),
        pack(tile.arguments(work, form), x=work.x, y=work.y, indices=work.indices, bad=bad),
        tile.places(work, form).end,
    )


def _instance(dtype: DType, index: DType, simple: bool, moves: bool) -> Instance:
    return Instance.of(
        "pool/window_scatter.cu", ELEMENT=dtype, INDEX=index, SIMPLE=simple, MOVE=moves
    )
