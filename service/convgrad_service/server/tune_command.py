"""``convgrad kernels tune``: choose kernels for a user's layers by timing them on this GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from convgrad.errors import DeviceUnavailable, ServiceError
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE
from convgrad_service.backends.cuda.tuning.tuned import read_table, table_text, use_table
from convgrad_service.backends.cuda.tuning.tuner import OPERATIONS, Bench, tune
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.server.warm_up import read_warm_up

Opener = Callable[[argparse.Namespace], tuple[CudaDevice, Bench]]


def tune_kernels(argv: Sequence[str], open_device: Opener | None = None) -> int:
    """Time the layers' gradients, and add those with a faster kernel to a table.

    Parameters
    ----------
    argv
        The command line.
    open_device
        Replaces the GPU of the command line, for tests.

    Returns
    -------
    int
        The exit status: 1 if there is no GPU or no layer that can be tuned, 2 for an invalid file.
    """
    options = _parser().parse_args(argv)
    try:
        problems = read_warm_up(options.layers)
        layers = read_table(options.out)["layers"] if options.out.exists() else {}
    except ValueError as invalid:
        print(f"convgrad kernels tune: {invalid}", file=sys.stderr)
        return 2
    gradients = [one for one in problems if one.operation in OPERATIONS]
    try:
        device, bench = (open_device or _open_gpu)(options)
    except DeviceUnavailable as missing:
        print(f"convgrad kernels tune: {missing}", file=sys.stderr)
        return 1
    if options.out.exists():
        table = read_table(options.out)
        if (table["device"], table["multiprocessors"]) != (device.name, device.multiprocessors):
            print(
                f"convgrad kernels tune: {options.out} is for {table['device']} with "
                f"{table['multiprocessors']} multiprocessors, not {device.name} with "
                f"{device.multiprocessors}; expected another --out",
                file=sys.stderr,
            )
            return 2
        use_table(options.out)
    tuned = faster = 0
    for problem in gradients:
        try:
            found = tune(problem, device, bench)
        except ServiceError as refused:
            print(f"{problem}: {refused}", file=sys.stderr)
            continue
        if found.key is None:
            print(f"{problem}: not tuned; expected 16-bit types, channels last, one group")
            continue
        tuned += 1
        chosen = f"{found.kernel} stays"
        if found.entry is not None:
            faster += 1
            layers[found.key] = found.entry
            # At once, so that a run that is interrupted keeps what it found.
            _write(options.out, table_text(device, layers))
            chosen = (
                f"{' '.join(found.entry)} instead of {found.kernel}: {found.now_s * 1e6:.1f} us"
            )
        print(f"{found.key}: {found.was_s * 1e6:.1f} us, {found.timed} timed; {chosen}", flush=True)
    _write(options.out, table_text(device, layers))
    print(f"{tuned} gradients timed, {faster} with a faster kernel; {len(layers)} in {options.out}")
    return 0 if tuned else 1


def _write(path: Path, text: str) -> None:
    """Replace the file at once, as a server may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _open_gpu(options: argparse.Namespace) -> tuple[CudaDevice, Bench]:
    # Imported here, as CuPy may be missing.
    from convgrad_service.backends.cuda.backend import CudaBackend
    from convgrad_service.backends.cuda.tuning.device_bench import DeviceBench

    backend = CudaBackend(options.device, cache=options.cache)
    return backend.device, DeviceBench(backend)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad kernels tune",
        description="Time every family's best configurations for the gradients of your layers on "
        "this machine's GPU, and write those that are faster than the present choice to a table. "
        "A server uses it with CONVGRAD_TUNING=FILE. The bits of these gradients may change, since "
        "their sums are split otherwise; without a new table they never do.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layers",
        type=Path,
        required=True,
        metavar="FILE",
        help="the layers or requests, as for `convgrad serve --warm-up`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tuning.json"),
        metavar="FILE",
        help="the table, which is extended if it exists (default: tuning.json)",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU")
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        metavar="FOLDER",
        help="folder of compiled kernels (default: inside the package)",
    )
    return parser
