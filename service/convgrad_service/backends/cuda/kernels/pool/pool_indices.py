"""Max pooling's gradient from its input by way of indices: any windows and types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.pooling import sliding_windows
from convgrad_service.plans.cuda.program import Fragment, Instance, Workspace
from convgrad_service.plans.cuda.works import PoolWork, WindowWork

__all__ = ["PoolThroughIndices"]


class PoolThroughIndices:
    """bwd from the input: the indices of maxima to a workspace, then the gradient from these."""

    name = "pool_through_indices"

    def __init__(
        self, maxima: Sequence[Family[WindowWork]], routes: Sequence[Family[WindowWork]]
    ) -> None:
        self._maxima, self._routes = maxima, routes

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        maxima, routes = _works(work)
        return self._maxima[-1].why_not(maxima, device) or self._routes[-1].why_not(routes, device)

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        maxima, routes = _works(work)
        steps = (
            *choose(self._maxima, maxima, device).fragment.steps,
            *choose(self._routes, routes, device).fragment.steps,
        )
        elements = work.batch * work.channels * prod(work.output)
        size_bytes = elements * maxima.index_dtype.itemsize
        return Fragment(self.name, steps, (Workspace(str(maxima.indices), size_bytes),))

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()


def _works(work: PoolWork) -> tuple[WindowWork, WindowWork]:
    """Return the work of finding maxima, and of adding their gradients."""
    windows = sliding_windows(work.pool)
    planes = {
        "batch": work.batch,
        "channels": work.channels,
        "channels_last": work.x.channels_last,
        "dtype": work.dtype,
        "dilation": work.pool.dilation,
        "indices": f"{work.prefix}maxima",
        "index_dtype": DType.INT32 if prod(work.input) <= 2**31 else DType.INT64,
        "prefix": work.prefix,
    }
    maxima = WindowWork(kind="maxima", windows=windows, x=work.source.buffer, y=None, **planes)
    routes = WindowWork(
        kind="routes",
        windows=tuple(axis.transposed() for axis in windows),
        counted=windows,
        x=work.y.buffer,
        y=work.x.buffer,
        **planes,
    )
    return maxima, routes
