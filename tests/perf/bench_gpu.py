"""GPU kernels compared with PyTorch's (cuDNN, ATen) on the suite's layers, with the same tensors.

    python -m tests.perf.bench_gpu --classes depthwise pool --dtypes bfloat16 --layouts NHWC
    python -m tests.perf.bench_gpu --suite fallbacks

Prints a table for each class and writes `tests/perf/results/gpu.jsonl`, a line for each layer,
operation, type and layout, in place of an older run's. Needs a GPU, CuPy and PyTorch.

Both sides are timed by the replay of a CUDA graph: the median over `--samples`, the L2 flushed
before each by writing 256 MB and then reading another 256 MB, so that the timed kernels evict
nothing that must be written back. Ours are the steps of the plan that the service would run; the
peer's is the operator of PyTorch's autograd, with cuDNN's search on. Every result is compared with
a float64 computation of the peer's operator first, from a poisoned output.

`--precision highest` computes float32 convolutions in true float32, compares them with PyTorch
without TF32, and stores both errors: PyTorch's is larger where it chooses a Winograd or Fourier
algorithm.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cupy
import torch

from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.graphs import Graphs
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.backends.cuda.nvrtc import find_nvrtc
from convgrad_service.backends.cuda.sources import source_hash
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from tests.perf.gpu_layers import Case, Tensors, cases_of, torch_dtype
from tests.perf.stale import standing_keys

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.jsonl"
FLUSH_BYTES = 256 * 2**20
# Seconds to wait after memory was freed, per byte: more than the device was seen to need.
FREED_S = 1e-10
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 2e-3}
TRUE_FLOAT32_TOLERANCE = 5e-6


def settle() -> None:
    """Free what the allocator caches, as a graph's capture does, and wait for the device.

    For some time after gigabytes were freed, such as a check's float64 tensors, it is slower: on an
    H200, kernels that are limited by memory take 1.07 to 1.15 of their time, ours and cuDNN's.
    """
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((reserved - torch.cuda.memory_reserved()) * FREED_S)


class Bench:
    """The device, its kernels, and the clock."""

    def __init__(self, samples: int) -> None:
        torch.backends.cudnn.benchmark = True
        self.device = describe(0, None)
        self.compiler = Compiler(
            find_nvrtc(cuda_driver_major()), self.device.architecture, DEFAULT_CACHE
        )
        self.kernels = Kernels(self.compiler)
        self.graphs = Graphs(self.kernels, lambda: cupy.cuda.Stream(non_blocking=True))
        # One for what is run before a recording and for the recording: nothing is made in it.
        self._side = torch.cuda.Stream()
        self.samples = samples
        self._dirty = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._clean = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def compile(self, plans: list[CudaPlan]) -> None:
        """Every kernel of the plans, side by side."""
        instances = {
            step.instance: None for plan in plans for step in plan.steps if isinstance(step, Launch)
        }
        for refusal in self.compiler.compile_all(instances):
            raise SystemExit(refusal)

    def ours(self, plan: CudaPlan, tensors: Tensors) -> Callable[[], None]:
        """What runs the plan's steps on the current stream; its workspace is part of it."""
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        workspace = {
            buffer.name: torch.full((buffer.size_bytes + 16,), -1, dtype=torch.int8, device="cuda")
            for buffer in plan.workspace
        }
        addresses |= {name: buffer.data_ptr() for name, buffer in workspace.items()}
        self.kernels.prepare(plan.steps)

        def run() -> None:
            assert workspace is not None
            stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
            with stream:
                self.graphs.run_steps(plan, addresses, stream)

        return run

    def seconds(self, run: Callable[[], Any]) -> float:
        """The median of a graph's replays."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
        times = []
        for _ in range(self.samples):
            self._dirty.fill_(1)
            self._clean.sum()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
        return float(statistics.median(a.elapsed_time(b) for a, b in times[2:])) / 1e3


def sources_of(plan: CudaPlan) -> dict[str, str]:
    """The plan's kernels, and the hash of each one's sources: what the figures hold for."""
    names = {step.instance.source for step in plan.steps if isinstance(step, Launch)}
    return {name: source_hash(name) for name in sorted(names)}


def outputs_of(case: Case) -> dict[str, Any]:
    """Poisoned: every element must be written."""
    return {
        name: torch.full(
            spec.shape,
            math.nan if spec.dtype.is_floating else -1,
            device="cuda",
            dtype=torch_dtype(str(spec.dtype)),
        )
        for name, spec in case.problem.outputs.items()
    }


def error_of(case: Case, found: Any) -> float:
    """||ours - float64|| / ||float64||, the largest; NaN where an element was not written."""
    wide = {name: tensor.double() for name, tensor in case.tensors.items()}
    reference = case.peer(wide)
    pairs = (
        zip(found, reference, strict=True) if isinstance(reference, list) else [(found, reference)]
    )
    errors = [
        float((ours.double() - wanted).norm() / wanted.double().norm()) for ours, wanted in pairs
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def measure(bench: Bench, case: Case, plan: CudaPlan, *, with_peer: bool) -> dict[str, Any]:
    """One line of results."""
    results = outputs_of(case)
    run = bench.ours(plan, {**case.tensors, **results})
    run()
    torch.cuda.synchronize()
    first, *others = results.values()
    error = error_of(case, [first, *others] if others else first)
    if not error <= (TRUE_FLOAT32_TOLERANCE if case.true_float32 else TOLERANCE[case.dtype]):
        raise SystemExit(
            f"{case.layer['name']} {case.op} {case.dtype} {case.layout}: error {error}"
        )
    ours_s = bench.seconds(run)
    peer_s = bench.seconds(lambda: case.peer(case.tensors)) if with_peer else None
    more: dict[str, Any] = {}
    if case.true_float32:
        more = {"precision": "highest"}
        if with_peer:
            more["peer_error"] = float(f"{error_of(case, case.peer(case.tensors)):.3g}")
    return {
        "bench": "gpu",
        "op": case.op,
        "layer": case.layer["name"],
        "class": case.layer["class"],
        "dtype": case.dtype,
        "layout": case.layout,
        "ours_ms": round(ours_s * 1e3, 4),
        "kernel": plan.kernel,
        "sources": sources_of(plan),
        "peer": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "peer_ms": None if peer_s is None else round(peer_s * 1e3, 4),
        "reference_ms": round(case.reference_s * 1e3, 4),
        "error": float(f"{error:.3g}"),
        "samples": bench.samples,
        **more,
    }


def facts(git_sha: str | None) -> dict[str, Any]:
    """Where and when, for every line."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    sha = git_sha or said("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12")
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "git_sha": sha or None,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0),
        "driver": driver.splitlines()[0] if driver else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cupy": cupy.__version__,
            "cuda": torch.version.cuda,
        },
    }


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("op", "layer", "dtype", "layout")
    return *(line[name] for name in names), line.get("precision")


def store(lines: list[dict[str, Any]], path: Path) -> None:
    """In place of older lines of the same measurements."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            kept[key_of(line)] = line
    kept |= {key_of(line): line for line in lines}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept.values()), encoding="utf-8")


def show(lines: list[dict[str, Any]]) -> None:
    """A table for each class, operation, type and layout, with geometric means."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        group = tuple(line[name] for name in ("class", "op", "dtype", "layout"))
        groups.setdefault((*group, line.get("precision", "")), []).append(line)
    for group, members in groups.items():
        print(
            f"\n{' '.join(group)}\n{'layer':24}{'ours us':>9}{'peer us':>9}{'faster':>8}{'/ref':>7}"
        )
        faster, over = [], []
        for line in members:
            ours, peer = line["ours_ms"], line["peer_ms"]
            over.append(ours / line["reference_ms"])
            text = f"{line['layer']:24}{ours * 1e3:9.1f}"
            if peer is not None:
                faster.append(peer / ours)
                text += f"{peer * 1e3:9.1f}{faster[-1]:7.2f}x"
            else:
                text += " " * 17
            print(f"{text}{over[-1]:7.2f}  {line['kernel']}")
        mean = f"{statistics.geometric_mean(faster):7.2f}x" if faster else " " * 8
        print(f"{'geomean':24}{'':18}{mean}{statistics.geometric_mean(over):7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="layers", help="a file of tests/perf/suite, by its stem")
    parser.add_argument("--classes", nargs="*", default=[], help="of the suite; none means all")
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--layouts", nargs="*", default=["NHWC"])
    parser.add_argument("--precision", choices=("high", "highest"), default="high")
    parser.add_argument("--samples", type=int, default=22)
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--stale", action="store_true", help="only rows missing or out of date")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    suite = json.loads((HERE / "suite" / f"{given.suite}.json").read_text(encoding="utf-8"))
    layers = [
        layer
        for layer in suite
        if (not given.classes or layer["class"] in given.classes)
        and (not given.layers or layer["name"] in given.layers)
    ]
    bench = Bench(given.samples)
    where = facts(given.git_sha)
    standing = standing_keys(given.results, key_of) if given.stale else set()
    lines = []
    for dtype in given.dtypes:
        tf32 = given.precision == "high"
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        for layout in given.layouts:
            for layer in layers:
                for case in cases_of(layer, dtype, layout, tuple(given.ops)):
                    if not tf32 and dtype == "float32" and "pool" not in layer["class"]:
                        problem: Any = case.problem
                        case = replace(case, problem=replace(problem, precision="highest"))
                    precision = "highest" if case.true_float32 else None
                    key = case.op, layer["name"], dtype, layout, precision
                    if key in standing:
                        continue
                    plan = plan_for(case.problem, bench.device, FAMILIES)
                    bench.compile([plan])
                    lines.append(measure(bench, case, plan, with_peer=not given.no_peer) | where)
                    store(lines[-1:], given.results)
                torch.cuda.empty_cache()
    show(lines)


if __name__ == "__main__":
    main()
