"""The gradient of max pooling from indices, and max unpooling, channels first."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.pool.window_box import BOX_BLOCK, Tile, tiled
from convgrad_service.backends.cuda.kernels.pool.window_form import MOVED, FromIndices, WindowForm
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowScatter"]


class WindowScatter(FromIndices[tuple[WindowForm, Tile]]):
    """The gradient of max pooling from indices, channels first, through shared memory."""

    name = "window_scatter"

    def solve(self, work: WindowWork, device: CudaDevice) -> tuple[WindowForm, Tile] | str:
        if work.kind != "routes":
            return "no gradient of maxima"
        if work.x_dtype not in (None, work.dtype):
            return "sums of another type"
        form = WindowForm.of(work)
        tile = tiled(work, form, device)
        return tile if isinstance(tile, str) else (form, tile)

    def launch(
        self, work: WindowWork, device: CudaDevice, config: tuple[WindowForm, Tile], bad: str | None
    ) -> Launch:
        form, tile = config
        return Launch(
            _instance(work.dtype, work.index_dtype, form.is_simple(form.counted), self._moves),
            (tile.blocks(form), 1, 1),
            (BOX_BLOCK, 1, 1),
            pack(tile.arguments(work, form), x=work.x, y=work.y, indices=work.indices, bad=bad),
            tile.places(work, form).end,
        )

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, index, simple, self._moves)
            for dtype in (MOVED.values() if self._moves else FLOATING)
            for index in INDEX
            for simple in (True, False)
        ]


def _instance(dtype: DType, index: DType, simple: bool, moves: bool) -> Instance:
    element = MOVED[dtype.itemsize] if moves else dtype
    return Instance.of(
        "pool/window_scatter.cu", ELEMENT=element, INDEX=index, SIMPLE=simple, MOVE=moves
    )
