"""Max unpooling, by windows or, if indices are outside of them, by planes; and its gradient."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    MOVED,
    FromIndices,
    WindowForm,
)
from convgrad_service.backends.cuda.kernels.pool.window_routes import WindowRoutes
from convgrad_service.backends.cuda.kernels.pool.window_scatter import WindowScatter
from convgrad_service.backends.cuda.kernels.pool.window_tiles import WindowTiles
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver, choose
from convgrad_service.plans.cuda.program import (
    Check,
    Clear,
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import UnpoolWork, WindowWork

__all__ = ["MaxUnpool"]

SCATTER_BLOCK = 128
GATHER_BLOCK, AT_ONCE = 256, 4
BAD_INDEX = "indices has an index that is out of its plane; expected a flat position in a plane"


MOVES: tuple[FromIndices[Any], ...] = (
    WindowTiles(moves=True),
    WindowScatter(moves=True),
    WindowRoutes(moves=True),
)

UnpoolArgs: Any = structure("pool/max_unpool.cu", "UnpoolArgs")


class MaxUnpool(Solver[UnpoolWork, Any]):
    """Max unpooling, forward and backward, of images with 32-bit offsets."""

    name = "max_unpool"

    def solve(self, work: UnpoolWork, device: CudaDevice) -> Any:
        """Return the kernel's arguments, or why there are none."""
        inner = work.channels if work.channels_last else 1
        if max(prod(work.size), prod(work.plane)) * inner > LARGEST - 2**16:
            return f"an image, or a plane, of more than {LARGEST - 2**16} elements"
        reason = None if work.windows is None else WindowForm.of(_by_windows(work)).why_not()
        return reason or _args(work)

    def fragment(self, work: UnpoolWork, device: CudaDevice, args: Any) -> Fragment:
        bad = f"{work.prefix}bad_index"
        steps: list[Step] = [Clear(bad, 16)]
        if work.kind == "gather":
            block, a_block = GATHER_BLOCK, GATHER_BLOCK * AT_ONCE
            grid = ceil_div(args.elements, a_block), ceil_div(args.batch, args.chunk), 1
        else:
            if work.windows is not None:
                steps += choose(MOVES, _by_windows(work), device).fragment.steps
            threads = args.batch * args.inner * (1 if work.channels_last else 32)
            block, grid = SCATTER_BLOCK, linear_grid(threads, SCATTER_BLOCK)
        instance = _instance(work.kind, work.dtype, work.channels_last)
        packed = pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad)
        steps.append(Launch(instance, grid, (block, 1, 1), packed))
        workspace, check = Workspace(bad, 16), Check(bad, BAD_INDEX)
        return Fragment(f"{self.name}_{work.kind}", tuple(steps), (workspace,), (check,))

    def instances(self) -> Iterable[Instance]:
        return [
            *(instance for family in MOVES for instance in family.instances()),
            *(
                _instance(kind, dtype, last)
                for kind, last in (("scatter", False), ("scatter", True), ("gather", False))
                for dtype in MOVED.values()
            ),
        ]


def _by_windows(work: UnpoolWork) -> WindowWork:
    """Return the work as routes: each position gathers from the windows that contain it."""
    windows = work.windows or ()
    return WindowWork(
        kind="routes",
        batch=work.batch,
        channels=work.channels,
        channels_last=work.channels_last,
        windows=tuple(axis.transposed() for axis in windows),
        dtype=work.dtype,
        x=work.x,
        y=work.y,
        indices=work.indices,
        index_dtype=work.index_dtype,
        counted=windows,
        checked=True,
        prefix=work.prefix,
    )


def _args(work: UnpoolWork) -> Any:
    args = UnpoolArgs()
    args.size, args.plane = prod(work.size), prod(work.plane)
    args.batch, args.inner = work.batch, work.channels
    if not work.channels_last:
        args.batch, args.inner = work.batch * work.channels, 1
    args.wide_indices = work.index_dtype is DType.INT64
    each = args.size * args.inner
    args.chunk = max(1, min(args.batch, (LARGEST - 2**16) // each))
    args.elements = args.chunk * each
    args.by_size, args.by_inner = divider(each), divider(args.inner)
    return args


def _instance(kind: str, dtype: DType, last: bool) -> Instance:
    return Instance.of(
        "pool/max_unpool.cu",
        ELEMENT=MOVED[dtype.itemsize],
        INNER=last and kind == "scatter",
        SCATTER=kind == "scatter",
    )
