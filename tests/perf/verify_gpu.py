"""What `/verify` and `/time` do on a GPU, checked and timed: run by hand where there is one.

    python -m tests.perf.verify_gpu results.json [--cpu]

References on the GPU against NumPy's; a server that verifies PyTorch's and its own results, and
times layers compared with cuDNN. Prints a line for each check and stops at nothing.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

import convgrad
from convgrad import check, layers
from convgrad.check.convolve import NumpyConvolver
from convgrad.check.geometry import Geometry
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cuda.backend import CudaBackend
from tests.support.http_server import LiveServer, serving

SMALL = ("g2mb2ic8ih9oc8oh5kh3sh2ph1", "mb2ic6id5oc4kd3pd1", "mb2ic5iw17oc7kw4sw3pw2")
TIMED = (
    ("conv_bwd_data", "resnet_56_3x3_64", "bfloat16", "NHWC"),
    ("grouped_conv_bwd_weight", "resnet_56_3x3_64", "bfloat16", "NHWC"),
    ("conv_fwd", "ck_headline", "bfloat16", "NHWC"),
    ("conv_bwd_data", "networks/64>64g1_56x56_k3x3_s1_d1", "bfloat16", "NHWC"),
    ("maxpool2d_fwd", "resnet_pool_3x3_s2", "bfloat16", "NHWC"),
    ("grouped_conv_conv_fwd", "mbv1_112_32_64", "bfloat16", "NHWC"),
)
DEVICE = "cpu" if "--cpu" in sys.argv else "cuda"  # the CPU's to try this file itself
SAMPLES = 1 if DEVICE == "cpu" else 8
found: dict[str, Any] = {}
failures: list[str] = []


def step(name: str, run: Callable[[], Any]) -> None:
    began_s = time.perf_counter()
    try:
        said = run()
        print(f"ok    {name} ({time.perf_counter() - began_s:.2f} s): {said}", flush=True)
        found[name] = said
    except Exception:  # noqa: BLE001 - the next step may tell more
        failures.append(name)
        print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)


def references(backend: Any) -> str:
    """Both convolvers on integers, where they must be equal."""
    on_gpu, on_cpu = backend.convolver(lambda: None), NumpyConvolver()
    rng = np.random.default_rng(1)
    for words in SMALL:
        layer = layers.parse(words)
        groups = layer.groups
        x = rng.integers(
            -2, 3, (layer.batch, groups, layer.in_channels // groups, *layer.input_size)
        )
        w = rng.integers(
            -2, 3,
            (groups, layer.out_channels // groups, layer.in_channels // groups, *layer.kernel_size),
        )  # fmt: skip
        geometry = Geometry.of(layer.geometry(), layer.kernel_size, input_size=layer.input_size)
        y = rng.integers(-2, 3, (*x.shape[:2], w.shape[1], *geometry.output_size))
        pairs = (
            (on_gpu.forward(x, w, geometry), on_cpu.forward(x, w, geometry)),
            (on_gpu.backward_data(y, w, geometry), on_cpu.backward_data(y, w, geometry)),
            (on_gpu.backward_weight(x, y, geometry), on_cpu.backward_weight(x, y, geometry)),
        )
        for mine, wanted in pairs:
            np.testing.assert_array_equal(mine[0], wanted[0])
            np.testing.assert_array_equal(mine[1], wanted[1])
    return f"{len(SMALL)} layers equal"


def reference_speed(backend: Any) -> dict[str, float]:
    on_gpu = backend.convolver(lambda: None)
    batch = 1 if DEVICE == "cpu" else 32
    layer = layers.parse("mb32ic64ih56oc64oh56kh3ph1").with_batch(batch)
    x = np.random.default_rng(1).standard_normal((batch, 1, 64, 56, 56))
    w = np.random.default_rng(2).standard_normal((1, 64, 64, 3, 3))
    geometry = Geometry.of(layer.geometry(), layer.kernel_size, input_size=layer.input_size)
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: on_gpu.forward(x, w, geometry),
        "backward_data": lambda: on_gpu.backward_data(x, w, geometry),
        "backward_weight": lambda: on_gpu.backward_weight(x, x, geometry),
    }
    speeds = {}
    for name, run in runs.items():
        run()
        began_s = time.perf_counter()
        run()
        speeds[name] = 2 * batch * 56 * 56 * 64 * 64 * 9 / (time.perf_counter() - began_s) / 1e9
    return {name: round(speed, 1) for name, speed in speeds.items()}  # GFLOP/s, copies included


def torch_result(layer: layers.Layer, tensors: dict[str, Any], parameters: Any) -> Any:
    dy, w = (torch.from_numpy(tensors[name]).to(DEVICE) for name in ("grad_output", "weight"))
    x = torch.empty((layer.batch, layer.in_channels, *layer.input_size), device=DEVICE)
    padding = [before for before, _ in layer.padding]
    out = torch.ops.aten.convolution_backward(
        dy, x, w, None, list(layer.stride), padding, list(layer.dilation), False,
        [0] * layer.ndim, layer.groups, (True, False, False),
    )  # fmt: skip
    return out[0].cpu().numpy()


def verified(client: convgrad.Client, words: str, *, tf32: bool) -> str:
    torch.backends.cudnn.allow_tf32 = tf32
    layer = layers.parse(words)
    shapes, parameters = layers.arguments("conv_bwd_data", layer)
    tensors = {name: check.draw(name, shape, "float32", 3) for name, shape in shapes.items()}
    mine = torch_result(layer, tensors, parameters)
    began_s = time.perf_counter()
    said = client.verify("conv_bwd_data", mine, layer=words, seed=3)
    took_s = time.perf_counter() - began_s
    output = said.outputs["grad_input"]
    assert output.worst is not None
    codes = [finding.code for finding in said.findings]
    allowed = client.verify("conv_bwd_data", mine, layer=words, seed=3, factors="tf32")
    return (
        f"passed {said.passed} {codes} worst {output.worst.share:.3g}, as TF32 {allowed.passed}, "
        f"on {said.reference.device} {said.reference.seconds:.2f} s, call {took_s:.2f} s, "
        f"ours {said.ours and said.ours.worst_share}"
    )


def own(client: convgrad.Client, operation: str, words: str, dtype: str, layout: str) -> str:
    """The server's own result, at the suite's size: computed, fetched and verified."""
    layer = layers.parse(words).with_batch(SAMPLES)
    shapes, parameters = layers.arguments(operation, layer, layout)
    tensors = {name: check.draw(name, shape, dtype, 3) for name, shape in shapes.items()}
    mine = getattr(client, operation)(**tensors, **parameters)
    if hasattr(mine, "_asdict"):
        mine = {name: array for name, array in mine._asdict().items() if array is not None}
    began_s = time.perf_counter()
    said = client.verify(
        operation, mine, layer=words, batch=SAMPLES, seed=3, dtype=dtype, layout=layout
    )
    sentences = [finding.sentence for finding in said.findings]
    worst = {name: output.worst.share for name, output in said.outputs.items() if output.worst}
    assert said.passed, sentences
    same = [output.bits.equal_to_ours for output in said.outputs.values()]
    return (
        f"worst {worst}, bits equal {same}, {time.perf_counter() - began_s:.2f} s, reference on "
        f"{said.reference.device} {said.reference.seconds:.2f} s, {said.ours and said.ours.kernel}"
    )


def timed(client: convgrad.Client, operation: str, words: str, dtype: str, layout: str) -> Any:
    batch = SAMPLES if DEVICE == "cpu" else 32 if words.startswith("networks") else None
    said = client.time(
        operation, layer=words, dtype=dtype, layout=layout, batch=batch, budget_s=1.5,
        candidates=words.startswith("resnet_56"),
    )  # fmt: skip
    us = {way: round(1e6 * each.median_s, 2) for way, each in said.timings.items()}
    shares = {way: round(each.reference_share, 3) for way, each in said.timings.items()}
    counts = {way: (each.samples, each.converged) for way, each in said.timings.items()}
    peers = [
        (
            peer.name,
            {way: round(1e6 * t.median_s, 2) for way, t in peer.timings.items()},
            peer.reason,
        )
        for peer in said.peers
    ]
    others = [(c.kernel, c.predicted_s, c.measured_s, c.reason) for c in said.candidates]
    return {
        "kernel": said.plan.kernel, "us": us, "share": shares, "samples": counts, "peers": peers,
        "reference_us": round(1e6 * said.reference.seconds, 2), "by": said.reference.limited_by,
        "rates": (said.reference.flops_per_s, said.reference.bytes_per_s, said.reference.source),
        "clocks": said.clocks_after and said.clocks_after.model_dump(exclude_none=True),
        "candidates": others,
    }  # fmt: skip


def events(server: LiveServer) -> str:
    body = {
        "layer": "mb8ic64ih28oc64kh3ph1",
        "dtype": "bfloat16",
        "layout": "NHWC",
        "budget_s": 0.3,
    }
    with httpx.stream(
        "POST", f"{server.url}/time/conv_fwd", json=body,
        headers={"accept": "text/event-stream"}, timeout=60,
    ) as answer:  # fmt: skip
        names = [line[7:] for line in answer.iter_lines() if line.startswith("event: ")]
    assert names[-1] == "result", names
    return f"{answer.status_code} {names}"


def main(target: Path) -> int:
    backend: Any = CpuBackend() if DEVICE == "cpu" else CudaBackend()
    step("references equal NumPy's", lambda: references(backend))
    step("reference GFLOP/s (16 GB/s copies included)", lambda: reference_speed(backend))
    with serving(backend, log_level="error") as server, convgrad.Client(server.url) as client:
        client = client.with_options(timeout=120)
        words = f"mb{1 if DEVICE == 'cpu' else 16}ic64ih56oc64oh56kh3ph1"
        step("PyTorch in float32 is right", lambda: verified(client, words, tf32=False))
        step("PyTorch in TF32 is named", lambda: verified(client, words, tf32=True))
        for case in TIMED:
            step(f"own {case}", partial(own, client, *case))
        for case in TIMED:
            step(f"timed {case}", partial(timed, client, *case))
        step("events", lambda: events(server))
        step("plan", lambda: client.plan("conv_bwd_data", layer="ck_headline", dtype="bfloat16",
                                         layout="NHWC").model_dump_json()[:700])  # fmt: skip
    target.write_text(json.dumps({"found": found, "failures": failures}, default=str, indent=1))
    print(f"{len(failures)} failures: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
