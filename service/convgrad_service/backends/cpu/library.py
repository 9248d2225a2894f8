"""Load the compiled kernels of the best instruction-set level that this CPU supports."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from convgrad.errors import DeviceUnavailable
from convgrad_service.plans.cpu_device import VECTOR_BYTES

__all__ = ["Kernel", "Library", "load", "team_function"]

NATIVE = Path(__file__).parent / "_native"
# Keys are the return values of `convgrad_cpu_level`. A CPU also runs every lower level.
LEVEL_NAMES = {"x86_64": {1: "x86_64", 3: "x86_64_v3", 4: "x86_64_v4"}, "aarch64": {1: "aarch64"}}

Kernel = Callable[[object, object, int], None]
"""A kernel's entry point: (byref(args), byref(control), scratch address). Releases the GIL."""


@dataclass(frozen=True)
class Library:
    """The loaded kernels of one instruction-set level."""

    level: str
    handle: ctypes.CDLL
    _kernels: dict[str, Kernel] = field(default_factory=dict, compare=False)

    @property
    def vector_bytes(self) -> int:
        """Size of the level's widest vector register."""
        return VECTOR_BYTES[self.level]

    def kernel(self, name: str) -> Kernel:
        """Return the entry point ``convgrad_<name>``.

        Raises
        ------
        DeviceUnavailable
            The library has no such kernel: it is older than this package.
        """
        known = self._kernels.get(name)
        if known is not None:
            return known
        try:
            function = getattr(self.handle, f"convgrad_{name}")
        except AttributeError:
            raise DeviceUnavailable(
                f"the CPU library for {self.level} holds no kernel {name!r}: it is older than this "
                f"package; {_HOW_TO_BUILD}"
            ) from None
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        kernel: Kernel = function
        self._kernels[name] = kernel
        return kernel


_HOW_TO_BUILD = (
    "build it with `python service/convgrad_service/backends/cpu/compile.py` (needs `ziglang`), "
    "or reinstall convgrad"
)


@functools.cache
def load(level: str | None = None) -> Library:
    """Load the kernels of one level; by default, of the best that this CPU supports.

    Raises
    ------
    DeviceUnavailable
        This architecture has no kernels, or they have not been built.
    """
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    names = LEVEL_NAMES.get(architecture)
    if names is None:
        raise DeviceUnavailable(
            f"the CPU kernels exist for {', '.join(LEVEL_NAMES)}, not for {architecture}"
        )
    if level is None:
        level = names[_open(names[1]).convgrad_cpu_level()]
    elif level not in names.values():
        raise DeviceUnavailable(
            f"there is no level {level!r} on {architecture}, only {', '.join(names.values())}"
        )
    return Library(level, _open(level))


def team_function(name: str, arguments: int) -> Callable[..., None]:
    """Return ``convgrad_team_<name>``, which is the same in the libraries of all levels.

    Raises
    ------
    DeviceUnavailable
        As `load`.
    """
    function = load().handle[f"convgrad_team_{name}"]
    function.restype = None
    # Slot and count are 64-bit integers, which c_void_p converts as well.
    function.argtypes = (ctypes.c_void_p,) * arguments
    typed: Callable[..., None] = function
    return typed


@functools.cache
def _open(level: str) -> ctypes.CDLL:
    path = NATIVE / f"libconvgrad_{level}.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceUnavailable(
            f"the CPU kernels for {level} cannot be loaded ({error}); {_HOW_TO_BUILD}"
        ) from error
