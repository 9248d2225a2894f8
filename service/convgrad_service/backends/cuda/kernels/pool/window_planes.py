"""Averages and maxima, channels first, from boxes of the planes in shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.pool.window_box import (
    ANY,
    BOX_BLOCK,
    SHAPES,
    Tile,
    from_lines,
    shape_of,
    tiled,
)
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    SMALL,
    WindowForm,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowPlanes"]

# Of windows each of whose lines is reduced once, and by how many they slide.
ROLLING_LINES, ROLLING_STEPS = 3, (1, 2)
# Windows of so many positions are left to others unless positions are in many windows, or lines are
# small.
LARGE_WINDOW, MUCH_OVERLAP = 24, 4


Tiled = tuple[WindowForm, Tile]


class WindowPlanes(Solver[WindowWork, Tiled]):
    """Averages and maxima, channels first, of windows that fit into shared memory."""

    name = "window_planes"

    def solve(self, work: WindowWork, device: CudaDevice) -> Tiled | str:
        if work.kind == "routes":
            return "a gradient of maxima"
        form = WindowForm.of(work)
        tile = tiled(work, form, device)
        if isinstance(tile, str):
            return tile
        large = form.most_window >= LARGE_WINDOW and form.overlap <= MUCH_OVERLAP
        small = _variant(work, form).shape != ANY
        if work.kind == "maxima" and large and not small:
            return f"windows of {LARGE_WINDOW} positions or more with little overlap"
        if tile.planes * prod(form.y_size) > LARGEST:
            return "planes of too many positions"
        return form, tile

    def fragment(self, work: WindowWork, device: CudaDevice, config: Tiled) -> Fragment:
        form, tile = config
        arguments = tile.arguments(work, form)
        arguments.windows.wide_indices = work.index_dtype is DType.INT64
        launch = Launch(
            _instance(work.dtype, _variant(work, form)),
            (tile.blocks(form), 1, 1),
            (BOX_BLOCK, 1, 1),
            pack(
                arguments,
                x=work.x,
                y=work.y,
                indices=work.indices,
                carried=work.carried,
            ),
            tile.places(work, form).end,
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        variants = [
            _Variant(shape, simple, rolling, maxima, weighted)
            for shape in (*SHAPES, ANY)
            for simple, rolling in ((False, 0), *((True, step) for step in (0, *ROLLING_STEPS)))
            for maxima, weighted in ((True, False), (False, False), (False, True))
        ]
        variants += [
            _Variant(ANY, False, 0, False, weighted, from_lines=True) for weighted in (False, True)
        ]
        chosen = dict.fromkeys(variant.compiled() for variant in variants)
        return [
            _instance(dtype, variant)
            for dtype in FLOATING
            for variant in chosen
            if dtype in SMALL or variant.shape == ANY
        ]


class _Variant(NamedTuple):
    """The macros of a kernel but its type."""

    shape: tuple[int, int]
    simple: bool
    rolling: int
    maxima: bool
    weighted: bool
    from_lines: bool = False

    def compiled(self) -> _Variant:
        """Return what is compiled for it: several are rare and run as a more general one."""
        lines, _ = shape = self.shape
        simple = self.simple and lines > 0 and not self.weighted
        rolls = shape == (ROLLING_LINES, ROLLING_LINES) and self.rolling in ROLLING_STEPS
        if not simple and lines == 1:
            shape = ANY  # lines without an instance of their own
        return self._replace(
            shape=shape, simple=simple, rolling=self.rolling if simple and rolls else 0
        )


def _variant(work: WindowWork, form: WindowForm) -> _Variant:
    maxima, shape = work.kind == "maxima", shape_of(work, form)
    simple = form.is_simple(form.windows, form.counted)
    along = form.windows[1]
    rolling = along.step if simple and along.last - along.first == ROLLING_LINES else 0
    weighted = form.varying == "inputs"
    return _Variant(shape, simple, rolling, maxima, weighted, from_lines(work, form)).compiled()


def _instance(dtype: DType, variant: _Variant) -> Instance:
    return Instance.of(
        "pool/window_planes.cu",
        ELEMENT=dtype,
        LINES=variant.shape[0],
        TAPS=variant.shape[1],
        SIMPLE=variant.simple,
        ROLLING=variant.rolling,
        MAXIMA=variant.maxima,
        WEIGHTED=variant.weighted,
        LINE_SUMS=variant.from_lines,
    )
