"""NVRTC, NVIDIA's run-time compiler, through its C interface: from source to cubin without a GPU.

The library comes from the ``nvidia-cuda-nvrtc`` wheel, or from a CUDA toolkit that the dynamic
loader finds. Run as a program, this file compiles what it is sent (see `compile_process`), so it
imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

__all__ = ["MAJORS", "CompileError", "Nvrtc", "find_nvrtc"]

MAJORS = (13, 12)
"""Major versions known to work, newest first."""


class CompileError(RuntimeError):
    """NVRTC is missing, or it rejected a source; the message holds its log."""


class Nvrtc:
    """The NVRTC library at ``path``. Thread-safe, but it compiles one source at a time.

    Raises
    ------
    OSError
        It cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # NVRTC opens its builtins by file name, which the loader resolves once they are loaded.
        beside = Path(path)
        if beside.is_absolute():
            for builtins in beside.parent.glob(f"libnvrtc-builtins.so{beside.suffix}.*"):
                ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version: tuple[int, int] = (major.value, minor.value)

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Compile one source; return the cubin and the log.

        Raises
        ------
        CompileError
            The source or an option was refused; the message holds the log.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            ctypes.c_int(0),
            None,
            None,
        )
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, ctypes.c_int(len(options)), given)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise CompileError(f"compiling {name} failed:\n{log}")
            return self._bytes(program, "CUBIN"), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            said = self._library.nvrtcGetErrorString(status).decode()
            raise CompileError(f"{function}: {said}")


@lru_cache(maxsize=4)
def find_nvrtc(newest_major: int = MAJORS[0]) -> Nvrtc:
    """Load the newest NVRTC installed that is not newer than the driver, which loads its cubins.

    Raises
    ------
    CompileError
        There is none.
    """
    majors = [major for major in MAJORS if major <= newest_major]
    for major in majors:
        for place in _places(major):
            try:
                return Nvrtc(place)
            except OSError:
                continue
    wanted = " or ".join(map(str, majors))
    raise CompileError(
        f"there is no NVRTC {wanted} in this environment; expected the wheel nvidia-cuda-nvrtc "
        "(convgrad[cuda13], convgrad[cuda12]) or a CUDA toolkit"
    )


def _places(major: int) -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for package in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(package).glob(f"*/lib/libnvrtc.so.{major}")):
            yield str(found)
    yield f"libnvrtc.so.{major}"


# Lower priority than computing threads have (`convgrad_service.process`).
_NICENESS = 10
_FIRST = 'extern "C" __global__ void first(float* at) { at[threadIdx.x] *= 2; }'


def _main() -> None:
    """Compile one request after another from standard input, with the library in the argument.

    A request is a line of JSON: source, name and options. So is the answer, with the log or the
    error, and the size of the cubin that follows it.
    """
    # Terminals and service managers send them to every process; only the parent handles them.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    nvrtc = Nvrtc(sys.argv[1])
    # A process's first compilation takes longer. Where no request waits yet, it is this one.
    if not select.select([sys.stdin], [], [], 0)[0]:
        with contextlib.suppress(CompileError):
            nvrtc.compile(_FIRST, "first.cu", ["--gpu-architecture=sm_90"])
    for line in sys.stdin.buffer:
        code, answer = b"", {}
        try:
            code, answer["log"] = nvrtc.compile(*json.loads(line))
        except CompileError as error:
            answer["error"] = str(error)
        head = json.dumps({**answer, "size": len(code)}).encode()
        sys.stdout.buffer.write(head + b"\n" + code)
        sys.stdout.buffer.flush()


def _end_with_parent() -> None:
    """End this process, even during a compilation, when the process that started it has ended."""
    hung_up = select.poll()
    hung_up.register(sys.stdin.fileno(), 0)
    hung_up.poll()
    os._exit(0)


if __name__ == "__main__":
    _main()
