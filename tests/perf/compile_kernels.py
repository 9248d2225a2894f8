"""Compiles every GPU kernel that a plan can choose, without a GPU, and reads what each uses.

    python tests/perf/compile_kernels.py [--arch sm_90a ...] [--match gather] [--jobs 2]

Prints one line an instance and fails where one does not compile, or spills registers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from convgrad_service.backends.cuda.compile import Compiler, Resources
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.plans.cuda_device import ARCHITECTURES
from convgrad_service.plans.cuda_program import Instance


class Line(NamedTuple):
    architecture: str
    instance: Instance
    resources: Resources | None
    error: str
    seconds: float

    def __str__(self) -> str:
        what = f"{self.architecture:7} {self.instance.name:44}"
        if self.resources is None:
            return f"{what} {self.error}"
        found = self.resources
        return (
            f"{what} {found.registers:4} registers {found.shared_bytes:6} B shared "
            f"{found.stack_bytes:4} B stack {found.spill_store_bytes:4} B spilled "
            f"{self.seconds:5.1f} s"
        )

    @property
    def good(self) -> bool:
        return self.resources is not None and not self.resources.spills


def compiled(architecture: str, instance: Instance) -> Line:
    compiler = Compiler(find_nvrtc(), architecture, cache=None)
    started = time.perf_counter()
    try:
        cubin = compiler.compile(instance)
    except CompileError as error:
        return Line(architecture, instance, None, str(error), 0.0)
    return Line(architecture, instance, cubin.resources, "", time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--match", default="", help="only instances whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    work = [
        (architecture, instance)
        for architecture in asked.arch
        for instance in FAMILIES.instances()
        if architecture in instance.architectures and asked.match in instance.name
    ]
    print(f"NVRTC {'.'.join(map(str, find_nvrtc().version))}, {len(work)} instances", flush=True)
    bad = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for line in pool.map(lambda item: compiled(*item), work):
            print(line, flush=True)
            if not line.good:
                bad.append(line)
    print(f"{len(work) - len(bad)} of {len(work)} compile without spilling")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
