"""The GPU kernels beside PyTorch's (cuDNN, ATen): the suite's layers, one process, same tensors.

    python tests/perf/bench_gpu.py --classes depthwise pool --dtypes bfloat16 --layouts NHWC

Prints a table for each class and writes `tests/perf/results/gpu.jsonl`, a line for each layer,
operation, type and layout, in place of an older run's. Needs a GPU, CuPy and PyTorch.

Both sides are timed by the replay of a CUDA graph: the median over `--samples`, the L2 flushed
before each by writing 256 MB and then reading another 256 MB, so that the timed kernels evict
nothing that must be written back. Ours are the steps of the plan that the service would run; the
peer's is the operator of PyTorch's autograd, with cuDNN's search on. Every result is compared with
a float64 computation of the peer's operator first, from a poisoned output.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cupy
import torch

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.backends.cuda.nvrtc import find_nvrtc
from convgrad_service.plans.cuda import plan_for
from convgrad_service.plans.cuda_program import CudaPlan, Launch
from convgrad_service.problems import (
    ConvBwdData,
    ConvFwd,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    Problem,
)
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.layouts import LAYOUTS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.jsonl"
COPY_BYTES_PER_S = 4.27e12
NODE_S = 3.1e-6
FLUSH_BYTES = 256 * 2**20
# Dense matrix peaks and, for depthwise layers, that of the FMA units; TF32 half of bf16.
PEAK_FLOPS = {"float16": 799e12, "bfloat16": 799e12, "float32": 399e12}
FMA_FLOPS = 60e12
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 2e-3}
OPERATIONS = {
    "pool": ("maxpool_bwd",),
    "separable": ("grouped_conv_conv_fwd",),
}
CONVOLUTIONS = ("conv_bwd_data", "grouped_conv_bwd_weight")

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One layer, one operation: the problem, its tensors, and the peer on the same tensors."""

    layer: Mapping[str, Any]
    op: str
    problem: Problem
    tensors: Tensors
    peer: Callable[[Tensors], Any]
    dtype: str
    layout: str

    @property
    def reference_s(self) -> float:
        """The time that bytes and arithmetic allow, and an empty graph node's."""
        flops = self.problem.valid_flops
        compute = flops / PEAK_FLOPS[self.dtype]
        if self.layer["class"] == "depthwise":
            compute = flops / FMA_FLOPS
        if self.layer["class"] == "pool":
            compute = 0.0
        return max(compute, self.problem.compulsory_bytes / COPY_BYTES_PER_S) + NODE_S


class Bench:
    """The device, its kernels, and the clock."""

    def __init__(self, samples: int) -> None:
        torch.backends.cudnn.benchmark = True
        self.device = describe(0, None)
        self.compiler = Compiler(
            find_nvrtc(cuda_driver_major()), self.device.architecture, DEFAULT_CACHE
        )
        self.kernels = Kernels(self.compiler)
        self.samples = samples
        self._dirty = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._clean = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def compile(self, plans: list[CudaPlan]) -> None:
        """Every kernel of the plans, side by side."""
        instances = {
            step.instance: None for plan in plans for step in plan.steps if isinstance(step, Launch)
        }
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(self.compiler.cubin, instances))

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
                self.kernels.run(plan.steps, addresses, stream)

        return run

    def seconds(self, run: Callable[[], Any]) -> float:
        """The median of a graph's replays."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
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
        return statistics.median(start.elapsed_time(stop) for start, stop in times[2:]) / 1e3


def torch_dtype(name: str) -> Any:
    return getattr(torch, name)


def random_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(torch_dtype(dtype))


def channels_first(tensor: Any, last: bool) -> Any:
    """A view in PyTorch's order of dimensions, whatever lies behind it."""
    return tensor.movedim(-1, 1) if last else tensor


def cases_of(
    layer: Mapping[str, Any], dtype: str, layout: str, ops: tuple[str, ...]
) -> Iterator[Case]:
    """The operations of a layer's class."""
    for op in OPERATIONS.get(layer["class"], CONVOLUTIONS):
        if not ops or op in ops:
            yield CASES[op](layer, dtype, layout, op)
    if "conv_fwd" in ops and layer["kind"] == "conv":
        yield CASES["conv_fwd"](layer, dtype, layout, "conv_fwd")


def _layout_of(layer: Mapping[str, Any], layout: str) -> Any:
    last = layout == "NHWC"
    spatial = "DHW"[-layer["ndim"] :]
    return LAYOUTS[f"N{spatial}C" if last else f"NC{spatial}"], last


def _shape_of(layer: Mapping[str, Any]) -> ConvShape:
    pads = tuple((pad, pad) for pad in layer["padding"])
    return ConvShape(
        batch=layer["N"],
        groups=layer["groups"],
        in_channels=layer["C"],
        out_channels=layer["K"],
        input_size=tuple(layer["input_size"]),
        kernel_size=tuple(layer["kernel_size"]),
        output_size=tuple(layer["output_size"]),
        stride=tuple(layer["stride"]),
        padding=pads,
        dilation=tuple(layer["dilation"]),
    )


def _conv_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    kind, outputs = {
        "conv_bwd_data": (ConvBwdData, [True, False, False]),
        "grouped_conv_bwd_weight": (GroupedConvBwdWeight, [False, True, False]),
        "conv_fwd": (ConvFwd, None),
    }[op]
    parsed, last = _layout_of(layer, layout)
    more: dict[str, Any] = {"precision": "high"} if dtype == "float32" else {}
    if kind is GroupedConvBwdWeight:
        more |= {"weight_dtype": DType(dtype), "split_k": None}
    if kind is ConvFwd:
        more |= {"bias": False}
    problem = kind(conv=_shape_of(layer), dtype=DType(dtype), layout=parsed, **more)
    specs = {**problem.inputs}
    specs.setdefault("input", problem.input_spec)
    specs.setdefault("weight", problem.weight_spec)
    tensors = {name: random_tensor(spec.shape, dtype) for name, spec in specs.items()}

    def peer(given: Tensors) -> Any:
        x, w = (channels_first(given[name], last) for name in ("input", "weight"))
        geometry = layer["stride"], layer["padding"], layer["dilation"]
        zeros = [0] * layer["ndim"]
        if outputs is None:
            result = torch.ops.aten.convolution(
                x, w, None, *geometry, False, zeros, layer["groups"]
            )
        else:
            grad = channels_first(given["grad_output"], last)
            results = torch.ops.aten.convolution_backward(
                grad, x, w, None, *geometry, False, zeros, layer["groups"], outputs
            )
            result = results[outputs.index(True)]
        return result.movedim(1, -1) if last else result

    return Case(layer, op, problem, tensors, peer, dtype, layout)


def _pool_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    parsed, last = _layout_of(layer, layout)
    ndim = layer["ndim"]
    pool = PoolShape(
        batch=layer["N"],
        channels=layer["C"],
        input_size=tuple(layer["input_size"]),
        kernel_size=tuple(layer["kernel_size"]),
        output_size=tuple(layer["output_size"]),
        stride=tuple(layer["stride"]),
        padding=tuple((pad, pad) for pad in layer["padding"]),
        dilation=tuple(layer["dilation"]),
        ceil_mode=False,
    )
    problem = MaxPoolBwd(
        pool=pool, dtype=DType(dtype), layout=parsed, source="input", index_dtype=None
    )
    tensors = {name: random_tensor(spec.shape, dtype) for name, spec in problem.inputs.items()}
    window = layer["kernel_size"], layer["stride"], layer["padding"], layer["dilation"]
    forward = getattr(torch.ops.aten, f"max_pool{ndim}d_with_indices")
    backward = getattr(torch.ops.aten, f"max_pool{ndim}d_with_indices_backward")
    x = channels_first(tensors["input"], last)
    indices = forward(x, *window)[1]

    def peer(given: Tensors) -> Any:
        """ATen's, with the indices given to it."""
        grad = channels_first(given["grad_output"], last)
        result = backward(grad, channels_first(given["input"], last), *window, False, indices)
        return result.movedim(1, -1) if last else result

    return Case(layer, f"maxpool{ndim}d_bwd", problem, tensors, peer, dtype, layout)


def _separable_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    parsed, last = _layout_of(layer, layout)
    first = _shape_of({**layer, "groups": layer["C"], "K": layer["C"]})
    ones = {"kernel_size": [1, 1], "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    second = _shape_of({**layer, **ones, "groups": 1, "input_size": layer["output_size"]})
    problem = GroupedConvConvFwd(
        conv0=first,
        conv1=second,
        dtype=DType(dtype),
        layout=parsed,
        bias0=False,
        bias1=False,
        activation0="none",
        activation1="none",
        **({"precision": "high"} if dtype == "float32" else {}),
    )
    tensors = {name: random_tensor(spec.shape, dtype) for name, spec in problem.inputs.items()}

    def peer(given: Tensors) -> Any:
        x, w0, w1 = (channels_first(given[name], last) for name in ("input", "weight0", "weight1"))
        between = torch.nn.functional.conv2d(
            x, w0, None, layer["stride"], layer["padding"], layer["dilation"], layer["C"]
        )
        result = torch.nn.functional.conv2d(between, w1)
        return result.movedim(1, -1) if last else result

    return Case(layer, op, problem, tensors, peer, dtype, layout)


CASES: Mapping[str, Callable[[Mapping[str, Any], str, str, str], Case]] = {
    **dict.fromkeys((*CONVOLUTIONS, "conv_fwd"), _conv_case),
    "maxpool_bwd": _pool_case,
    "grouped_conv_conv_fwd": _separable_case,
}


def outputs_of(case: Case) -> dict[str, Any]:
    """Poisoned: every element must be written."""
    return {
        name: torch.full(spec.shape, math.nan, device="cuda", dtype=torch_dtype(str(spec.dtype)))
        for name, spec in case.problem.outputs.items()
    }


def error_of(case: Case, result: Any) -> float:
    """||ours - float64|| / ||float64||; NaN where an element was not written."""
    wide = {name: tensor.double() for name, tensor in case.tensors.items()}
    reference = case.peer(wide)
    return float((result.double() - reference).norm() / reference.norm())


def measure(bench: Bench, case: Case, plan: CudaPlan, *, with_peer: bool) -> dict[str, Any]:
    """One line of results."""
    results = outputs_of(case)
    run = bench.ours(plan, {**case.tensors, **results})
    run()
    torch.cuda.synchronize()
    error = error_of(case, next(iter(results.values())))
    if not error <= TOLERANCE[case.dtype]:
        raise SystemExit(
            f"{case.layer['name']} {case.op} {case.dtype} {case.layout}: error {error}"
        )
    ours_s = bench.seconds(run)
    peer_s = bench.seconds(lambda: case.peer(case.tensors)) if with_peer else None
    return {
        "bench": "gpu",
        "op": case.op,
        "layer": case.layer["name"],
        "class": case.layer["class"],
        "dtype": case.dtype,
        "layout": case.layout,
        "ours_ms": round(ours_s * 1e3, 4),
        "kernel": plan.kernel,
        "peer": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "peer_ms": None if peer_s is None else round(peer_s * 1e3, 4),
        "reference_ms": round(case.reference_s * 1e3, 4),
        "error": float(f"{error:.3g}"),
        "samples": bench.samples,
    }


def facts() -> dict[str, Any]:
    """Where and when, for every line."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    sha = said("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12")
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
    return tuple(line[name] for name in ("op", "layer", "dtype", "layout"))


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
        groups.setdefault(
            tuple(line[name] for name in ("class", "op", "dtype", "layout")), []
        ).append(line)
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
    parser.add_argument("--classes", nargs="*", default=[], help="of the suite; none means all")
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--layouts", nargs="*", default=["NHWC"])
    parser.add_argument("--samples", type=int, default=22)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    suite = json.loads((HERE / "suite" / "layers.json").read_text(encoding="utf-8"))
    layers = [
        layer
        for layer in suite
        if (not given.classes or layer["class"] in given.classes)
        and (not given.layers or layer["name"] in given.layers)
    ]
    bench = Bench(given.samples)
    where = facts()
    lines = []
    for dtype in given.dtypes:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        for layout in given.layouts:
            for layer in layers:
                for case in cases_of(layer, dtype, layout, tuple(given.ops)):
                    plan = plan_for(case.problem, bench.device, FAMILIES)
                    bench.compile([plan])
                    lines.append(measure(bench, case, plan, with_peer=not given.no_peer) | where)
                    store(lines[-1:], given.results)
                torch.cuda.empty_cache()
    show(lines)


if __name__ == "__main__":
    sys.exit(main())
