"""The backend in use, and what it leaves to PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from convgrad.errors import (
    InvalidProblem,
    PayloadTooLarge,
    ProblemTooLarge,
    ServiceError,
    UnsupportedProblem,
)
from convgrad.torch._backends import Backend
from convgrad.torch._front import Front, install
from convgrad.torch._local import Local

__all__ = ["CHOICE", "backend_in_use", "left_to_pytorch", "shapes", "takes_forward"]

# Any other error, such as a wrong API key or a failed server, is raised to the caller.
_DECLINED = (InvalidProblem, UnsupportedProblem, ProblemTooLarge, PayloadTooLarge)


class Choice:
    """The backend in use. Process-wide, because autograd uses its own threads."""

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.fallback = True
        self.libraries: list[Any] = []
        self.overrides: dict[str, dict[str, Callable[..., Any]]] = {}  # by dispatch key
        self.front: Front | None = None
        self.tried = False  # whether `install` has been called
        self.lock = threading.Lock()

    def set(self, backend: Backend | None, fallback: bool) -> None:
        self.backend, self.fallback = backend, fallback
        if isinstance(backend, Local):
            self._install_once()
        if self.front is not None:
            self.front.choose(backend, fallback)

    def _install_once(self) -> None:
        with self.lock:
            if not self.tried:
                self.tried = True
                self.front = install(self.overrides["CUDA"]) if torch.cuda.is_available() else None


CHOICE = Choice()


def backend_in_use() -> Backend | None:
    """Return the backend in use."""
    return CHOICE.backend


def takes_forward(backend: Backend, input: torch.Tensor) -> bool:
    """Return whether `use` gives the backend forward passes on this input."""
    return input.device.type in getattr(backend, "forward_devices", ())


def left_to_pytorch(error: ServiceError, input: torch.Tensor) -> bool:
    """Return whether the error is a refusal that `use` leaves to PyTorch."""
    return isinstance(error, _DECLINED) and (CHOICE.fallback or input.numel() == 0)


def shapes(*tensors: torch.Tensor) -> str:
    """Describe tensors for `report`, e.g. ``8x64x56x56 * 128x64x3x3``."""
    return " * ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
