"""``convgrad kernels``: compile every GPU kernel ahead, so that no request waits for a compiler."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import MAJORS, CompileError, find_nvrtc
from convgrad_service.cgroups import usable_cores
from convgrad_service.plans.cuda.device import ARCHITECTURES

__all__ = ["kernels"]


def kernels(argv: Sequence[str] | None = None) -> int:
    """Compile into the cache what is not there; the exit code: 0, or 1 if something was refused."""
    options = _parser().parse_args(argv)
    try:
        nvrtc = find_nvrtc(_newest_cuda())
        architectures = options.arch or [describe(0).architecture]
    except (CompileError, DeviceUnavailable) as missing:
        print(f"convgrad kernels: {missing}", file=sys.stderr)
        return 1
    refused = 0
    for architecture in architectures:
        compiler = Compiler(nvrtc, architecture, options.cache, jobs=options.jobs)
        wanted = [
            one
            for one in FAMILIES.instances()
            if one.is_for(architecture) and options.match in one.name
        ]
        if not wanted:
            # One that nobody compiled for would be found out from the time of its first requests.
            print(
                f"convgrad kernels: no kernel for {architecture} has {options.match!r} in its name",
                file=sys.stderr,
            )
            refused += 1
            continue

        failures = compiler.compile_all(wanted)
        print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
        done = len(wanted) - len(failures)
        print(f"{architecture}: {done} of {len(wanted)} kernels in {options.cache}", flush=True)
        refused += len(failures)
    return 1 if refused else 0


def _newest_cuda() -> int:
    # Where there is no driver, as in an image's build, any NVRTC that is installed will do.
    try:
        return cuda_driver_major() or MAJORS[0]
    except DeviceUnavailable:
        return MAJORS[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad kernels",
        description="Compile the GPU kernels ahead, with or without a GPU. What is compiled "
        "already stays as it is.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHITECTURES,
        metavar="ARCH",
        help=f"one or more of {', '.join(ARCHITECTURES)}; without it, that of this machine's GPU",
    )
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="only kernels whose names hold this"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        metavar="FOLDER",
        help="where to (by default the folder inside the package)",
    )
    parser.add_argument(
        "--jobs", type=int, default=usable_cores(), metavar="N", help="compile so many at once"
    )
    return parser
