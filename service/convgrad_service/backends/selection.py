"""Creates the backend that a setting names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.base import ServingBackend
from convgrad_service.backends.cpu import CpuBackend

__all__ = ["BackendName", "BackendOptions", "backend_named"]

BackendName = Literal["auto", "cpu", "cuda"]
# About the number of kernels of a server's first problem.
COMPILERS_AHEAD = 4
_log = logging.getLogger("convgrad.backends")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options of all backends.

    The CPU uses ``threads`` and ``workspace_limit_bytes``, a GPU the others: ``kernel_cache``, the
    folder of compiled kernels (default: one inside the package), ``tuning``, a table of tuned
    layers, and ``device``, the GPU's index.
    """

    threads: int | None = None
    workspace_limit_bytes: int = 256 * 2**20
    kernel_cache: Path | None = None
    tuning: Path | None = None
    device: int = 0


def backend_named(name: BackendName, options: BackendOptions) -> ServingBackend:
    """Create a backend; ``auto`` is ``cuda`` if that works here, else ``cpu``, and logs why.

    Raises
    ------
    DeviceUnavailable
        The backend does not work here; the message says why.
    """
    return _MAKERS[name](options)


def _cpu(options: BackendOptions) -> ServingBackend:
    return CpuBackend(threads=options.threads, workspace_limit_bytes=options.workspace_limit_bytes)


def _cuda(options: BackendOptions) -> ServingBackend:
    # Imported here: it takes half a second, which processes without a GPU need not spend.
    from convgrad_service.backends.cuda.backend import CudaBackend
    from convgrad_service.backends.cuda.compile import DEFAULT_CACHE
    from convgrad_service.backends.cuda.plan_process import PlanProcess
    from convgrad_service.backends.cuda.tuning.tuned import use_table

    use_table(options.tuning)
    backend = CudaBackend(
        device=options.device,
        cache=options.kernel_cache or DEFAULT_CACHE,
        compilers_ahead=COMPILERS_AHEAD,
    )
    backend.plan = PlanProcess(backend.device, options.tuning).plan
    return backend


def _auto(options: BackendOptions) -> ServingBackend:
    try:
        return _cuda(options)
    except DeviceUnavailable as error:
        _log.info("computing on the CPU: %s", error.detail)
        return _cpu(options)


_MAKERS: Mapping[BackendName, Callable[[BackendOptions], ServingBackend]] = {
    "auto": _auto,
    "cpu": _cpu,
    "cuda": _cuda,
}
