"""The cost of NaN, infinities and subnormals: every class and dtype, compared with finite data.

    python -m tests.perf.bench_nonfinite [--device gpu] [--classes dense first] [--dtypes float32]
        [--over 1.1]

Run by `make bench-nonfinite`: on the GPU where there is one, else, or with `--device cpu`, on the
CPU. Prints a line for each layer, operation and dtype, the slowest kind first, and writes
`tests/perf/results/nonfinite.jsonl`, a line for each kind of data, in place of an older run's.

A kind is what one operand of a layer holds (a pool's input, else grad_output, or the forward's
input): finite normal numbers; one NaN or one infinity among them; an image of them; nothing else;
an image of subnormals; subnormals alone; in the last image of each channel one finite value very
much larger than all others (the input's last image is zero, so sums without it stay small).
`ratio` is its time over that of finite data. All kinds are measured in turn, in several rounds, and
the least counts. On the GPU times are medians of a graph's replays, as `bench_gpu` takes them; on
the CPU they are CPU times of one thread, which other programs on the machine hardly change.
`float32, high` is TF32; the CPU has one precision.
`--over` measures only layers, operations and dtypes again of which a stored ratio is greater.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import problem_from
from tests.perf.provenance import cpu_model, origin

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "nonfinite.jsonl"
KINDS = (
    "one NaN",
    "one Inf",
    "NaN image",
    "Inf image",
    "all NaN",
    "all Inf",
    "subnormal image",
    "all subnormal",
    "outliers",
)
# One or two of a class, in what its kernels differ: taps, strides, how a sum is split.
LAYERS = (
    "resnet_56_3x3_64",
    "resnet_14_1x1_1024_256",
    "resnet_28_3x3_128",
    "resnet_56_3x3_128_s2",
    "resnet_conv1",
    "resnext_56_g32_c4",
    "resnext_14_g32_c16",
    "mbv2_dw_56_144",
    "convnext_dw7_14_384",
    "resnet_pool_3x3_s2",
    "mbv1_28_256_256",
)
GPU_DTYPES = {
    "bfloat16": ("bfloat16", "high"),
    "float16": ("float16", "high"),
    "float32, high": ("float32", "high"),
    "float32": ("float32", "highest"),
}
CPU_DTYPES = ("float32", "bfloat16", "float16", "float64")
GPU_SAMPLES, GPU_ROUNDS, CPU_ROUNDS = 14, 2, 60

Line = dict[str, Any]
Spoil = Callable[[str], None]


def times_by_kind(spoil: Spoil, seconds: Callable[[], float], rounds: int) -> dict[str, float]:
    """Of finite data and of each kind, the least of several rounds."""
    kinds = ("finite", *KINDS)
    times = dict.fromkeys(kinds, math.inf)
    for _ in range(rounds):
        for kind in kinds:
            spoil(kind)
            times[kind] = min(times[kind], seconds())
    return times


def spoilt_of(kind: str, inputs: Iterable[str]) -> str:
    """The operand that is spoilt."""
    return "input" if kind == "pool" or "grad_output" not in inputs else "grad_output"


def lines_of(of: Mapping[str, Any], times: Mapping[str, float], samples: int) -> Iterator[Line]:
    """A record for each kind of data; `of` says what was measured, and where."""
    for kind, taken in times.items():
        yield {
            "bench": "nonfinite",
            **of,
            "kind": kind,
            "ours_ms": round(taken * 1e3, 4),
            "ratio": round(taken / times["finite"], 3),
            "peer": None,
            "peer_ms": None,
            "reference_ms": None,
            "samples": samples,
        }


# --- on the GPU ----------------------------------------------------------------------------------


def spoiler_on_gpu(tensor: Any) -> Spoil:
    """Fills a channels-last tensor of PyTorch's with a kind of data, in place."""
    import torch

    finite = tensor.clone()
    tiny = torch.finfo(tensor.dtype).smallest_normal
    some = torch.randint(1, 2**7, tensor.shape, device=tensor.device).to(torch.float64)
    subnormal = (some * tiny / 2**7).to(tensor.dtype)  # seven bits: of every dtype's subnormals

    def spoil(kind: str) -> None:
        tensor.copy_(finite)
        value = float("nan") if "NaN" in kind else float("inf")
        if kind.startswith("one"):
            tensor.view(-1)[tensor.numel() // 3] = value
        elif kind.startswith("subnormal"):
            tensor[0].copy_(subnormal[0])
        elif kind == "all subnormal":
            tensor.copy_(subnormal)
        elif kind == "outliers":
            tensor[-1, 1, 1] = torch.finfo(tensor.dtype).max / 8
        elif kind.endswith("image"):
            tensor[0] = value
        elif kind.startswith("all"):
            tensor.fill_(value)

    return spoil


def on_gpu(given: argparse.Namespace) -> Iterator[Line]:
    """Every layer, operation and dtype that was asked for."""
    import torch

    from convgrad_service.backends.cuda.families import FAMILIES
    from convgrad_service.plans.cuda.planner import plan_for
    from tests.perf.bench_gpu import Bench, facts, outputs_of
    from tests.perf.gpu_layers import cases_of

    bench = Bench(GPU_SAMPLES)
    where = facts(given.git_sha)
    suite = json.loads((HERE / "suite" / "layers.json").read_text(encoding="utf-8"))
    layers = {layer["name"]: layer for layer in suite}
    wanted = [
        (name, dtype, precision, layers[layer])
        for layer in LAYERS
        if layer in layers and (not given.classes or layers[layer]["class"] in given.classes)
        for name, (dtype, precision) in GPU_DTYPES.items()
        if not given.dtypes or name in given.dtypes
    ]

    def cases(name: str, dtype: str, precision: str, layer: Any) -> Iterator[tuple[Line, Any, Any]]:
        if layer["class"] == "pool" and name == "float32":
            return  # of one precision
        for case in cases_of(layer, dtype, "NHWC", ()):
            of = {"op": case.op, "layer": layer["name"], "class": layer["class"]}
            of |= {"dtype": name, "layout": "NHWC"}
            if not given.wants({**of, **where}):
                continue
            problem: Any = case.problem
            if dtype == "float32" and layer["class"] != "pool":
                problem = replace(problem, precision=precision)
            plan = plan_for(problem, bench.device, FAMILIES)
            yield {**of, "kernel": plan.kernel, **where}, replace(case, problem=problem), plan

    bench.compile([plan for each in wanted for _, _, plan in cases(*each)])
    for each in wanted:
        for of, case, plan in cases(*each):
            spoilt = case.tensors[spoilt_of(of["class"], case.problem.inputs)]
            given_x = case.tensors.get("input")
            if given_x is not None and given_x is not spoilt:
                given_x[-1] = 0
            # Kept: a recording frees what nothing holds.
            tensors = {**case.tensors, **outputs_of(case)}
            run = bench.ours(plan, tensors)
            times = times_by_kind(
                spoiler_on_gpu(spoilt),
                lambda run=run: bench.seconds(run),  # type: ignore[misc]
                given.rounds or GPU_ROUNDS,
            )
            yield from lines_of(of, times, GPU_SAMPLES)
        torch.cuda.empty_cache()


# --- on the CPU ----------------------------------------------------------------------------------

# Class, channels in and out, groups, size, kernel, stride; four images.
CPU_LAYERS: tuple[tuple[str, int, int, int, int, int, int], ...] = (
    ("dense", 64, 64, 1, 28, 3, 1),
    ("dense", 256, 64, 1, 14, 1, 1),
    ("first", 3, 32, 1, 56, 7, 2),
    ("grouped", 64, 64, 16, 28, 3, 1),
    ("depthwise", 96, 96, 96, 28, 3, 1),
    ("pool", 64, 64, 1, 56, 3, 2),
)


def spoiler_on_cpu(array: np.ndarray[Any, Any], layout: str) -> Spoil:
    """Fills an array with a kind of data, in place."""
    finite = array.copy()
    limits = ml_dtypes.finfo(array.dtype)  # type: ignore[no-untyped-call]
    tiny = float(limits.smallest_normal)
    channels = array[-1, 1, 1] if layout == "NHWC" else array[-1, :, 1, 1]
    some = np.random.default_rng(1).integers(1, 2**7, array.shape)
    subnormal = (some * (tiny / 2**7)).astype(array.dtype)

    def spoil(kind: str) -> None:
        array[...] = finite
        value = np.nan if "NaN" in kind else np.inf
        if kind.startswith("one"):
            array.flat[array.size // 3] = value
        elif kind.startswith("subnormal"):
            array[0] = subnormal[0]
        elif kind == "all subnormal":
            array[...] = subnormal
        elif kind == "outliers":
            channels[...] = float(limits.max) / 8
        elif kind.endswith("image"):
            array[0] = value
        elif kind.startswith("all"):
            array[...] = value

    return spoil


def on_cpu(given: argparse.Namespace) -> Iterator[Line]:
    """Every layer, operation, layout and dtype that was asked for."""
    backend = CpuBackend(threads=1)
    where = origin(f"{cpu_model()}, 1 thread", {"numpy": np.__version__})
    rounds = given.rounds or CPU_ROUNDS
    for kind, c, k, groups, size, kernel, stride in CPU_LAYERS:
        if given.classes and kind not in given.classes:
            continue
        out = (size + 2 * (kernel // 2) - kernel) // stride + 1
        for dtype in given.dtypes or CPU_DTYPES:
            for layout in ("NCHW", "NHWC"):
                rng = np.random.default_rng(0)

                def draw(
                    n: int,
                    c: int,
                    h: int,
                    w: int,
                    last: bool = layout == "NHWC",
                    of: np.random.Generator = rng,
                    dtype: str = dtype,
                ) -> np.ndarray[Any, Any]:
                    return of.standard_normal((n, h, w, c) if last else (n, c, h, w)).astype(dtype)

                x, y = draw(4, c, size, size), draw(4, k, out, out)
                if kind != "pool":
                    x[-1] = 0
                weight = draw(k, c // groups, kernel, kernel)
                params: dict[str, Any] = {
                    "stride": stride,
                    "padding": kernel // 2,
                    "layout": layout,
                }
                requests: dict[str, dict[str, Any]]
                if kind == "pool":
                    requests = {"maxpool2d_bwd": {"input": x, "kernel_size": kernel}}
                else:
                    params["groups"] = groups
                    requests = {
                        "conv_bwd_data": {"weight": weight, "input_size": (size, size)},
                        "grouped_conv_bwd_weight": {"input": x, "weight_size": (kernel, kernel)},
                    }
                for operation, more in requests.items():
                    request = validate(
                        OPERATIONS[operation].request, {**params, **more, "grad_output": y}
                    )
                    problem, tensors = problem_from(operation, request), request.tensors()

                    def seconds(problem: Any = problem, tensors: Any = tensors) -> float:
                        started = time.process_time()
                        backend.run(problem, tensors)
                        return time.process_time() - started

                    name = f"{c} to {k} in {groups}, {kernel}x{kernel} s{stride} @{size}"
                    of = {"op": operation, "layer": name, "class": kind}
                    of |= {"dtype": dtype, "layout": layout}
                    if not given.wants({**of, **where}):
                        continue
                    spoil = spoiler_on_cpu(tensors[spoilt_of(kind, tensors)], layout)
                    times = times_by_kind(spoil, seconds, rounds)
                    yield from lines_of({**of, **where}, times, rounds)


# --- both ----------------------------------------------------------------------------------------


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("device", "op", "layer", "dtype", "layout", "kind")
    return tuple(line[name] for name in names)


def stored(path: Path) -> list[Line]:
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def store(lines: list[Line], path: Path) -> None:
    """In place of older lines of the same measurements."""
    kept = {key_of(line): line for line in (*stored(path), *lines)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept.values()), encoding="utf-8")


def wants(over: float | None, path: Path) -> Callable[[Line], bool]:
    """Whether to measure a layer, operation and dtype: all, or those with a greater ratio."""
    if over is None:
        return lambda line: True
    # Whatever the device.
    groups = {key_of(line)[1:-1] for line in stored(path) if line["ratio"] > over}
    return lambda line: key_of({**line, "kind": ""})[1:-1] in groups


def show(lines: list[Line]) -> None:
    """Of each layer, operation and dtype the kinds, the slowest first; and how many exceed 1.1x."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(key_of(line)[1:-1], []).append(line)
    for (op, layer, dtype, layout), members in groups.items():
        finite = next(line["ours_ms"] for line in members if line["kind"] == "finite")
        others = sorted(members, key=lambda line: -line["ratio"])
        told = ", ".join(f"{line['kind']} {line['ratio']:.2f}x" for line in others[:3])
        print(f"{layer:34} {op:24} {dtype:14} {layout} {finite * 1e3:9.1f} us  {told}")
    over = sum(line["ratio"] > 1.1 for line in lines)
    print(f"{over} of {len(lines)} take more than 1.1x of finite data")


def has_gpu() -> bool:
    try:
        import cupy
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available() and cupy.cuda.runtime.getDeviceCount())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default=None)
    parser.add_argument("--classes", nargs="*", default=[], help="of layers; none means all")
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--over", type=float, help="only where a stored ratio is greater")
    parser.add_argument("--rounds", type=int, help=f"{GPU_ROUNDS} on a GPU, else {CPU_ROUNDS}")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.wants = wants(given.over, given.results)
    device = given.device or ("gpu" if has_gpu() else "cpu")
    lines = list(on_gpu(given) if device == "gpu" else on_cpu(given))
    store(lines, given.results)
    show(lines)


if __name__ == "__main__":
    main()
