"""Compile the CPU kernels (``kernels/*.cpp``) into one library per instruction-set level.

The libraries also hold the native code that launches GPU kernels (``inprocess/native``).

Run it as a script (``python compile.py``); the wheel's build hook calls ``compile_libraries``. It
imports only the standard library because the hook runs before the package is installed. The
compiler is zig's clang from PyPI (``ziglang``, a build-time dependency): it needs no system
compiler and targets an old glibc, so the wheels run on old distributions.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = (HERE / "kernels", HERE.parents[1] / "inprocess" / "native")
NATIVE = HERE / "_native"
# The repository root in a checkout, otherwise the root of the source distribution.
_ROOT = HERE.parents[3] if (HERE.parents[3] / "client").is_dir() else HERE.parents[2]
_CACHE = _ROOT / "build" / "zig-cache"
# Environment variables that place zig's caches.
CACHES = {
    "ZIG_GLOBAL_CACHE_DIR": str(_CACHE / "global"),
    "ZIG_LOCAL_CACHE_DIR": str(_CACHE / "local"),
}

FLAGS = (
    "-std=c++20",
    "-O3",
    "-g0",
    "-shared",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-sanitize=all",
    "-fvisibility=hidden",
    "-nostdlib++",
    "-nostdinc++",
    # Contraction to FMA is allowed. -ffast-math is not: NaN, Inf and subnormals must survive.
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Werror",
)


@dataclass(frozen=True)
class Level:
    """One library: its name suffix, compilation target and CPU feature flags."""

    name: str
    target: str
    flags: tuple[str, ...]

    @property
    def library(self) -> Path:
        return NATIVE / f"libconvgrad_{self.name}.so"


_X86_TARGET = "x86_64-linux-gnu.2.17"
_ARM_TARGET = "aarch64-linux-gnu.2.17"
LEVELS = {
    "x86_64": (
        Level("x86_64", _X86_TARGET, ("-mcpu=x86_64",)),
        Level("x86_64_v3", _X86_TARGET, ("-mcpu=x86_64_v3",)),
        Level("x86_64_v4", _X86_TARGET, ("-mcpu=x86_64_v4", "-mprefer-vector-width=512")),
    ),
    "aarch64": (Level("aarch64", _ARM_TARGET, ()),),
}


class CompileError(RuntimeError):
    """The compiler is missing or rejected a source. The message includes its output."""


def machine() -> str:
    """Return this machine's architecture, a key of `LEVELS`."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def compile_libraries(architecture: str | None = None) -> list[Path]:
    """Compile outdated libraries; return all of the architecture's (default: this machine's).

    Raises
    ------
    CompileError
        ziglang is not installed, the architecture has no kernels, or a source does not compile.
    """
    architecture = architecture or machine()
    levels = LEVELS.get(architecture)
    if levels is None or not sys.platform.startswith("linux"):
        raise CompileError(
            f"the CPU kernels are built for Linux on {', '.join(LEVELS)}, "
            f"not for {sys.platform} on {architecture}"
        )
    sources = sorted(path for folder in SOURCES for path in folder.glob("*.cpp"))
    headers = sorted(path for folder in SOURCES for path in folder.glob("*.hpp"))
    newest = max(path.stat().st_mtime for path in (*sources, *headers, Path(__file__)))
    stale = [level for level in levels if not _is_current(level.library, newest)]
    if stale:
        NATIVE.mkdir(exist_ok=True)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(lambda level: _compile(level, sources), stale))
    return [level.library for level in levels]


def _is_current(library: Path, newest_source: float) -> bool:
    return library.exists() and library.stat().st_mtime >= newest_source


def _compile(level: Level, sources: list[Path]) -> None:
    partial = level.library.with_suffix(f".{os.getpid()}.tmp.so")
    command = [sys.executable, "-m", "ziglang", "c++", "-target", level.target]
    command += [*level.flags, *FLAGS, "-o", str(partial), *map(str, sources)]
    started = max(path.stat().st_mtime for path in sources)
    try:
        done = subprocess.run(  # noqa: S603 - our own compiler on our own sources
            command, env={**os.environ, **CACHES}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CompileError(f"compiling {level.name} failed:\n{done.stderr}")
        # Atomic: a process that loads the library meanwhile sees the old one.
        partial.replace(level.library)
    finally:
        partial.unlink(missing_ok=True)
    if max(path.stat().st_mtime for path in sources) > started:
        os.utime(level.library, (0, 0))  # a source changed during compilation: stay outdated


if __name__ == "__main__":
    try:
        built = compile_libraries(sys.argv[1] if len(sys.argv) > 1 else None)
    except CompileError as error:
        sys.exit(str(error))
    for path in built:
        print(path.relative_to(HERE), f"{path.stat().st_size / 1024:.0f} KiB")
