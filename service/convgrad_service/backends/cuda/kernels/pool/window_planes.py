"""Averages and maxima, channels first, from boxes of the planes in shared memory."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.pool.window_box import BOX_BLOCK, Tile, tiled
from convgrad_service.backends.cuda.kernels.pool.window_form import WindowForm, most_positions
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowPlanes"]

# (LINES, TAPS) of windows whose lines are reduced once; the first that fits is used.
SHAPES = ((1, 4), (2, 2), (3, 3))
ANY = (0, 0)
# Windows larger than this are maxima of `window_reduce` unless positions are in many windows.
LARGE_WINDOW, MUCH_OVERLAP = 24, 4


Tiled = tuple[WindowForm, Tile]


class WindowPlanes(Solver[WindowWork, Tiled]):
    """Averages and maxima, channels first, of windows that fit into shared memory."""

    name = "window_planes"

    def solve(self, work: WindowWork, device: CudaDevice) -> Tiled | str:
        if work.kind == "routes":
            return "a gradient of maxima"
        form = WindowForm.of(work)
        large = form.most_window >= LARGE_WINDOW and form.overlap <= MUCH_OVERLAP
        if work.kind == "maxima" and large:
            return f"windows of {LARGE_WINDOW} positions or more with little overlap"
        tile = tiled(work, form, device)
        return tile if isinstance(tile, str) else (form, tile)

    def fragment(self, work: WindowWork, device: CudaDevice, config: Tiled) -> Fragment:
        form, tile = config
        launch = Launch(
            _instance(work.dtype, work.index_dtype, *_variant(work, form)),
            (tile.blocks(form), 1, 1),
            (BOX_BLOCK, 1, 1),
            pack(
                tile.arguments(work, form),
                x=work.x,
                y=work.y,
                indices=work.indices,
                carried=work.carried,
            ),
            tile.places(work, form).end,
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, index, shape, simple, maxima, weighted)
            for dtype in FLOATING
            for shape in (*SHAPES, ANY)
            for simple in (True, False)
            for index, maxima, weighted in (
                *((index, True, False) for index in INDEX),
                *((DType.INT64, False, weighted) for weighted in (False, True)),
            )
        ]


def _variant(work: WindowWork, form: WindowForm) -> tuple[tuple[int, int], bool, bool, bool]:
    """Return (LINES, TAPS), and whether the kernel is SIMPLE, MAXIMA and WEIGHTED."""
    slices, lines, taps = map(most_positions, form.windows)
    maxima = work.kind == "maxima"
    fitting = (shape for shape in SHAPES if lines <= shape[0] and taps <= shape[1])
    whole = maxima and (slices > 1 or work.carried is not None)
    shape = ANY if whole else next(fitting, ANY)
    simple = form.is_simple(form.windows, form.counted)
    return shape, simple, maxima, form.varying == "inputs"


def _instance(
    dtype: DType, index: DType, shape: tuple[int, int], simple: bool, maxima: bool, weighted: bool
) -> Instance:
    return Instance.of(
        "pool/window_planes.cu",
        ELEMENT=dtype,
        INDEX=index,
        LINES=shape[0],
        TAPS=shape[1],
        SIMPLE=simple,
        MAXIMA=maxima,
        WEIGHTED=weighted,
    )
