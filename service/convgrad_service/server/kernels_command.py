"""``convgrad kernels``: compile GPU kernels ahead, so that no request waits for a compiler.

``convgrad kernels tune`` is `tune_command`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import MAJORS, CompileError, find_nvrtc
from convgrad_service.plans.cuda.device import ARCHITECTURES
from convgrad_service.process import usable_cores


def kernels(argv: Sequence[str] | None = None) -> int:
    """Compile kernels that the cache lacks; return the exit status, 1 if any did not compile."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["tune"]:
        # Not above: an image's build compiles without the rest of the server.
        from convgrad_service.server.tune_command import tune_kernels

        return tune_kernels(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        nvrtc = find_nvrtc(_newest_cuda())
        architectures = options.arch or [describe(0).architecture]
    except (CompileError, DeviceUnavailable) as missing:
        hint = (
            "" if isinstance(missing, CompileError) else "; to compile for another GPU, use --arch"
        )
        print(f"convgrad kernels: {missing}{hint}", file=sys.stderr)
        return 1
    failed = 0
    for architecture in architectures:
        compiler = Compiler(nvrtc, architecture, options.cache, jobs=options.jobs)
        wanted = [
            one
            for one in FAMILIES.instances()
            if one.is_for(architecture) and any(text in one.name for text in options.match or [""])
        ]
        if not wanted:
            print(
                f"convgrad kernels: no kernel for {architecture} has any of {options.match} in its "
                "name",
                file=sys.stderr,
            )
            failed += 1
            continue

        if not all(map(compiler.is_cached, wanted)) and (why := _refuses_files(options.cache)):
            print(f"convgrad kernels: cannot write to {options.cache}: {why}", file=sys.stderr)
            return 1
        failures = compiler.compile_all(wanted)
        if options.copy_to is not None and not failures:
            options.copy_to.mkdir(parents=True, exist_ok=True)
            for one in wanted:
                (options.copy_to / compiler.file_name(one)).write_bytes(compiler.cubin(one).code)
        print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
        done = sum(map(compiler.is_cached, wanted))
        print(f"{architecture}: {done} of {len(wanted)} kernels in {options.cache}", flush=True)
        failed += len(wanted) - done
    return 1 if failed else 0


def _refuses_files(folder: Path) -> OSError | None:
    """Return why no file can be made in a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def _newest_cuda() -> int:
    # Without a driver, as in an image build, use any installed NVRTC.
    try:
        return cuda_driver_major() or MAJORS[0]
    except DeviceUnavailable:
        return MAJORS[0]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad kernels",
        description="Compile the GPU kernels ahead of time, with or without a GPU. Kernels that "
        "are in the cache already are not compiled again. To choose kernels for your own layers by "
        "measurement, see `convgrad kernels tune --help`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHITECTURES,
        metavar="ARCH",
        help=f"one or more of {', '.join(ARCHITECTURES)}; by default this machine's GPU's",
    )
    parser.add_argument(
        "--match",
        nargs="*",
        default=[],
        metavar="TEXT",
        help="only kernels whose names contain one of these",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        metavar="FOLDER",
        help="folder of compiled kernels (default: inside the package)",
    )
    parser.add_argument(
        "--copy-to",
        type=Path,
        metavar="FOLDER",
        help="folder to copy these kernels to; unlike the cache, it gets no others",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=usable_cores(),
        metavar="N",
        help="number of concurrent compilations",
    )
    return parser
