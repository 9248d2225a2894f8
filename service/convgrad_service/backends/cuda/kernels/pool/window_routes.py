"""The gradient of max pooling over windows, from the indices of the maxima."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.max_pool import BAD_INDEX
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    WindowForm,
    most_positions,
    window_args,
    window_grid,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Check, Clear, Fragment, Instance, Launch, Workspace
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowRoutes", "check", "routes", "routes_instances"]

BLOCK = 128
# Planes of a thread if adjacent threads have adjacent positions.
PLANES = 4
# Windows of a position along the last two axes that are loaded at once; the first entry that fits
# is used, or else they are loaded one by one.
NEAR = ((1, 2), (2, 2))
ONE_BY_ONE = (0, 0)
# Registers for their indices; more would spill.
MOST_WORDS = 32


class WindowRoutes:
    """The gradient of max pooling from indices, of images with 32-bit offsets."""

    name = "window_routes"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.kind != "routes":
            return "no gradient of maxima"
        return WindowForm.of(work).why_not()

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        if not work.checked:
            return Fragment(self.name, (routes(work),))
        bad = f"{work.prefix}bad_index"
        steps = (Clear(bad, 4), check(work, bad), routes(work))
        return Fragment(self.name, steps, (Workspace(bad, 4),), (Check(bad, BAD_INDEX),))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return routes_instances(moves=False)


def check(work: WindowWork, bad: str, *, moves: bool = False) -> Launch:
    """Return the launch that checks indices against their windows."""
    form = WindowForm.of(work)
    args = window_args(form, 1, form.x_size)
    return Launch(
        _instance(work.dtype, work.index_dtype, 1, 1, ONE_BY_ONE, moves, check=True),
        window_grid(args, 1, BLOCK),
        (BLOCK, 1, 1),
        pack(args, indices=work.indices, bad=bad),
    )


def routes(work: WindowWork, *, moves: bool = False) -> Launch:
    """Return the launch; with ``moves`` it moves elements instead of adding them."""
    form = WindowForm.of(work)
    width = form.width(work.dtype)
    planes = 1 if form.last else PLANES
    args = window_args(form, width, form.y_size, planes)
    rows, columns = map(most_positions, form.windows[1:])
    words = width * work.index_dtype.itemsize // 4
    fitting = (
        near
        for near in NEAR
        if rows <= near[0] and columns <= near[1] and prod(near) * words <= MOST_WORDS
    )
    near = next(fitting, ONE_BY_ONE)
    return Launch(
        _instance(work.dtype, work.index_dtype, width, planes, near, moves),
        window_grid(args, planes, BLOCK),
        (BLOCK, 1, 1),
        pack(args, x=work.x, y=work.y, indices=work.indices),
    )


def routes_instances(*, moves: bool) -> list[Instance]:
    """Return every instance that `routes` and `check` use."""
    checks = [
        _instance(dtype, index, 1, 1, ONE_BY_ONE, moves, check=True)
        for dtype in FLOATING
        for index in INDEX
    ]
    return checks + [
        _instance(dtype, index, width, planes, near, moves)
        for dtype in FLOATING
        for index in INDEX
        for near in (*NEAR, ONE_BY_ONE)
        for width, planes in ((CHUNK_BYTES // dtype.itemsize, 1), (1, 1), (1, PLANES))
    ]


def _instance(
    dtype: DType,
    index: DType,
    width: int,
    planes: int,
    near: tuple[int, int],
    moves: bool,
    *,
    check: bool = False,
) -> Instance:
    return Instance.of(
        "pool/window_routes.cu",
        {
            "ELEMENT": CUDA_TYPES[dtype],
            "INDEX": CUDA_TYPES[index],
            "WIDTH": width,
            "PLANES": planes,
            "ROWS": near[0],
            "COLUMNS": near[1],
            "MOVE": int(moves),
            "CHECK": int(check),
        },
    )
