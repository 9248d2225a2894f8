"""The backend that a setting names, or the reason why it cannot be made here."""

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
# As many as a server's first problem usually has kernels.
COMPILERS_AHEAD = 4
_log = logging.getLogger("convgrad.backends")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What backends are made with; each takes what concerns it.

    ``threads`` and ``workspace_limit_bytes`` are the CPU's; ``kernel_cache`` is the folder of
    compiled GPU kernels, by default one inside the package; ``tuning`` is a table of tuned layers
    for the GPU; ``device`` is the GPU's number.
    """

    threads: int | None = None
    workspace_limit_bytes: int = 256 * 2**20
    kernel_cache: Path | None = None
    tuning: Path | None = None
    device: int = 0


def backend_named(name: BackendName, options: BackendOptions) -> ServingBackend:
    """``cpu`` or ``cuda``; ``auto`` is ``cuda`` where it works, else ``cpu``, and logs why.

    Raises:
        DeviceUnavailable: the backend named cannot work here; the sentence says why.
    """
    return _MAKERS[name](options)


def _cpu(options: BackendOptions) -> ServingBackend:
    return CpuBackend(threads=options.threads, workspace_limit_bytes=options.workspace_limit_bytes)


def _cuda(options: BackendOptions) -> ServingBackend:
    # Here, so that processes that do not compute on a GPU start half a second of a core sooner.
    from convgrad_service.backends.cuda.backend import CudaBackend
    from convgrad_service.backends.cuda.compile import DEFAULT_CACHE
    from convgrad_service.backends.cuda.kernels.conv import pointwise_gemm_model
    from convgrad_service.backends.cuda.tuning.tuned import use_table

    use_table(options.tuning)
    backend = CudaBackend(
        device=options.device,
        cache=options.kernel_cache or DEFAULT_CACHE,
        compilers_ahead=COMPILERS_AHEAD,
    )
    # Not in the first request.
    pointwise_gemm_model.prepare(backend.device)
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
