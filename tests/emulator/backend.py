"""A backend that runs GPU plans in the emulator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache, lru_cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Outcome, Vitals
from convgrad_service.backends.cpu import compile as cpu_compile
from convgrad_service.backends.cpu import library
from convgrad_service.backends.cuda.kernels.core.tensor_maps import MAP_ALIGNMENT, MappedArguments
from convgrad_service.backends.cuda.sources import KERNELS, included
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Arguments,
    Clear,
    CudaPlan,
    Instance,
)
from convgrad_service.problems import Problem
from tests.emulator.maps import encode
from tests.emulator.memory import Buffers, Stretch

__all__ = ["EmulatedBackend", "Launching", "launch_of", "works_here"]

HERE = Path(__file__).parent
# These headers replace kernel headers of the same names.
INSTEAD = HERE / "kernels"
BUILD = HERE.parents[1] / "build" / "emulator"
UNWRITTEN = 0xFF

# Inline assembly in core/elements.cuh, and equivalent C++.
ASSEMBLY = {
    r'asm\("cvt\.f32\.f16 [^;]*;"[^;]*;': "wide = emulator::half_to_float(value.bits);",
    r'asm\("cvt\.rn\.f16\.f32 [^;]*;"[^;]*;': "narrowed.bits = emulator::float_to_half(value);",
    r'asm\("cvt\.rn\.bf16\.f32 [^;]*;"[^;]*;': "narrowed.bits = emulator::float_to_bfloat(value);",
}
_DYNAMIC = re.compile(
    r"extern __shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?([\w ]+?) (\w+)\[\];"
)
_ARGUMENTS = re.compile(r"(\w+)\(const __grid_constant__ (\w+) args\)")
_CLUSTER = re.compile(r"__cluster_dims__\((\w+)")


HEADERS = ("emulator.hpp", "transfers.hpp", "cuda.hpp", "launch.hpp")
# Zig maps every -O level to its highest. Clang's -O1 compiles 20% faster, and kernels run only once
# or twice.
OPTIONS = "-std=c++20 -O2 -Xclang -O1 -ffp-contract=off -fno-sanitize=all -g0 -w -shared -fPIC"
# A misaligned vector access faults on a GPU. launch.hpp defines the functions that report it.
OPTIONS += " -fsanitize=alignment,array-bounds"
# The C++ standard library is not used, so it need not be compiled.
OPTIONS += " -nostdlib++ -nostdinc++ -fno-exceptions"


class Launching(ctypes.Structure):
    """See ``launch.hpp``."""

    _fields_ = (
        ("arguments", ctypes.c_void_p),
        ("stretches", ctypes.POINTER(Stretch)),
        ("stretch_count", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
    )


def works_here() -> bool:
    """Whether the emulator runs on this machine: its context switch is written for x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@cache
def _options() -> tuple[str, ...]:
    """Return compiler options for the instruction-set level of the CPU kernels.

    `make kernels` has already cached the compiler's runtime libraries for that target.
    """
    named = library.load().level
    level = next(one for one in cpu_compile.LEVELS[cpu_compile.machine()] if one.name == named)
    return ("-target", level.target, *level.flags, *OPTIONS.split())


def _translated(instance: Instance) -> str:
    """Translate a kernel's source and headers to C++ for the CPU."""
    # Headers precede the files that include them.
    texts = [f'#line 1 "{Path(name).name}"\n{_text(name)}' for name in _in_order(instance.source)]
    source = re.sub(r"#include \"[^\"]*\"|#pragma (once|unroll.*)", "", "\n".join(texts))
    # C++ requires alignas first, and has no dynamically sized shared memory.
    source = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 __shared__", source)
    source = _DYNAMIC.sub(
        r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared);", source
    )
    for instruction, meaning in ASSEMBLY.items():
        source = re.sub(instruction, meaning, source)
    # A number or a macro of the instance; otherwise it belongs to another entry point.
    cluster = [dict(instance.defines).get(found, found) for found in _CLUSTER.findall(source)]
    blocks = next(filter(str.isdecimal, cluster), "1")
    structure = dict(_ARGUMENTS.findall(source))[instance.entry]
    defines = "".join(f"#define {name} {value}\n" for name, value in instance.defines)
    return (
        f'#include "cuda.hpp"\n{defines}{source}\n'
        f"#define ENTRY {instance.entry}\n#define ARGUMENTS {structure}\n"
        f"#define CLUSTER_BLOCKS {blocks}\n"
        '#include "launch.hpp"\n'
    )


def _text(name: str) -> str:
    instead = INSTEAD / name
    return (instead if instead.exists() else KERNELS / name).read_text()


def _in_order(source: str) -> list[str]:
    """Return a source and its headers, in topological order: each after those that it includes."""
    files = included(source)
    return list(TopologicalSorter({name: included(name)[1:] for name in files}).static_order())


@lru_cache(maxsize=256)
def launch_of(instance: Instance) -> Any:
    """Return the launch function of an instance, compiled unless it is cached in build/."""
    text = _translated(instance)
    headers = "".join((HERE / name).read_text() for name in HEADERS)
    headers += " ".join(_options())
    key = hashlib.sha256((text + headers).encode()).hexdigest()[:24]
    built = BUILD / f"{instance.entry}-{key}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        source = built.with_suffix(f".{os.getpid()}.{threading.get_ident()}.cpp")
        source.write_text(text)
        partial = source.with_suffix(".so")
        command = [sys.executable, "-m", "ziglang", "c++", *_options(), f"-I{HERE}"]
        command += ["-o", str(partial), str(source)]
        done = subprocess.run(
            command,
            env={**os.environ, **cpu_compile.CACHES},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        partial.replace(built)
        source.unlink()
    launch = ctypes.CDLL(str(built)).launch
    launch.argtypes, launch.restype = [ctypes.POINTER(Launching)], ctypes.c_char_p
    return launch


def filled_by(arguments: Arguments, addresses: Mapping[str, int]) -> NDArray[np.uint8]:
    """Return the bytes of a kernel's argument structure, aligned for tensor maps."""
    if isinstance(arguments, MappedArguments):
        filled = arguments.fill_by(encode, addresses)
    else:
        filled = arguments.fill(addresses)
    memory = np.empty(len(filled) + MAP_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % MAP_ALIGNMENT
    aligned = memory[start : start + len(filled)]
    aligned[...] = np.frombuffer(filled, np.uint8)
    return aligned


class EmulatedBackend:
    """Compute as `CudaBackend` does, and detect every access outside a plan's buffers.

    It supports the kernel families that the emulator can translate.
    """

    name = "emulated"
    fault: str | None = None

    def __init__(self, families: Families, device: CudaDevice = H200) -> None:
        """Make plans for ``device`` with these kernel families."""
        self._families, self._device = families, device
        self._lock = threading.Lock()  # a kernel's shared memory is static

    def explain(self, problem: Problem) -> CudaPlan:
        return plan_for(problem, self._device, self._families)

    def vitals(self) -> Vitals:
        return Vitals()

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        plan = self.explain(problem)
        sizes = {
            **{name: spec.size_bytes for name, spec in problem.inputs.items()},
            **{name: spec.size_bytes for name, spec in problem.outputs.items()},
            **{item.name: item.size_bytes for item in plan.workspace},
        }
        memory = Buffers({**sizes, ZEROS: ZEROS_BYTES}, UNWRITTEN)
        memory.bytes[ZEROS][...] = 0
        before = {
            name: np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8)
            for name in problem.inputs
        }
        for name, data in before.items():
            memory.bytes[name][...] = data
        with self._lock:
            for step in plan.steps:
                if isinstance(step, Clear):
                    memory.bytes[step.buffer][: step.size_bytes] = 0
                    continue
                filled = filled_by(step.arguments, memory.addresses)
                assert step.block[1:] == (1, 1)
                assert step.grid[0] < 2**31, step.grid
                assert max(step.grid[1:]) < 2**16, step.grid
                wrong = launch_of(step.instance)(
                    Launching(
                        filled.ctypes.data,
                        memory.stretches,
                        len(memory.stretches),
                        step.grid,
                        step.block[0],
                        step.shared_bytes,
                        step.cluster,
                    )
                )
                assert wrong is None, f"{step.instance.name}: {wrong.decode()}"
                assert not memory.bytes[ZEROS].any(), (
                    f"{step.instance.name} left something among the zeros"
                )
                spilled = memory.spilled()
                assert spilled is None, f"{step.instance.name}: a write beside {spilled}"
        for name, data in before.items():
            assert (memory.bytes[name] == data).all(), f"a write to the input {name}"
        for check in plan.checks:
            if memory.bytes[check.buffer][:8].view(np.int64)[0]:
                raise InvalidProblem(check.sentence)
        outputs = {
            name: memory.bytes[name].view(spec.dtype.numpy).reshape(spec.shape).copy()
            for name, spec in problem.outputs.items()
        }
        return Outcome(outputs, plan.kernel, 0.0, 1, plan.workspace_bytes)
