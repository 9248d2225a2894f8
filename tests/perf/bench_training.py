"""A training step of whole networks, by PyTorch alone and with `convgrad.torch.use(Local())`.

Forward, backward and fused SGD; bfloat16 autocast, channels last; as one CUDA graph, both ways in
one process, and eager, where PyTorch alone has a process that never calls `use`. The two ways are
timed by turns. An eager step takes the host's time, which other programs on the host can only
lengthen: what counts is the median of each way's quietest turn. Needs torch, torchvision, timm and
a GPU::

    python -m tests.perf.bench_training --batches 32 128 --out training.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

import convgrad.torch as ours
from tests.perf.provenance import origin

NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "resnet50": (torchvision.models.resnet50, (3, 224, 224)),
    "convnext_tiny": (torchvision.models.convnext_tiny, (3, 224, 224)),
    "efficientnet_b0": (torchvision.models.efficientnet_b0, (3, 224, 224)),
    "mobilenetv3_large": (torchvision.models.mobilenet_v3_large, (3, 224, 224)),
    "regnety_3_2gf": (torchvision.models.regnet_y_3_2gf, (3, 224, 224)),
    "r3d_18": (torchvision.models.video.r3d_18, (3, 16, 112, 112)),
    "densenet121": (torchvision.models.densenet121, (3, 224, 224)),
    "ghostnet_100": (lambda: timm.create_model("ghostnet_100"), (3, 224, 224)),
}


# Of each way by turns: clocks drift, and other programs take the host's time.
ROUNDS, EAGER_ROUNDS = 3, 8


class Step:
    """One training step on fixed data, eager or as a CUDA graph."""

    def __init__(self, name: str, batch: int) -> None:
        make, shape = NETWORKS[name]
        torch.manual_seed(0)
        memory = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
        self.model = make().cuda().to(memory_format=memory).train()
        self.x = torch.randn(batch, *shape, device="cuda").to(memory_format=memory)
        self.y = torch.randint(0, 400, (batch,), device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def recorded(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


def samples_ms(run: Callable[[], Any], seconds: float) -> list[float]:
    run()
    torch.cuda.synchronize()
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(found) < 5:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def compiled(step: Step, local: ours.Local) -> float:
    """Have the kernels that a step needs; returns the seconds that took."""
    started = time.monotonic()
    with ours.use(ours.Local(wait=False)):
        step()
    with ours.use(local):
        step()
    torch.cuda.synchronize()
    return time.monotonic() - started


def time_alone(requests: Any) -> None:
    """Answer a network, batch and seconds by the times of eager steps of PyTorch alone."""
    what: tuple[str, int] | None = None
    step: Step | None = None
    while (request := requests.recv()) is not None:
        name, batch, seconds = request
        if what != (name, batch):
            step = None
            torch.cuda.empty_cache()
            step, what = Step(name, batch), (name, batch)
        assert step is not None
        requests.send(samples_ms(step, seconds))


def measure(name: str, batch: int, seconds: float, local: ours.Local, alone: Any) -> dict[str, Any]:
    step = Step(name, batch)
    compile_s = compiled(step, local)
    ours.report(reset=True)
    median = statistics.median
    own_eager: list[float] = []
    peer_eager: list[float] = []
    for _ in range(EAGER_ROUNDS):
        with ours.use(local):
            own_eager.append(median(samples_ms(step, seconds / ROUNDS)))
        alone.send((name, batch, seconds / ROUNDS))
        peer_eager.append(median(alone.recv()))
    rows = ours.report(reset=True).rows
    with ours.use(local):
        own_graph = step.recorded()
    left = sum(row.calls for row in rows if row.computed_by == "PyTorch")
    peer_graph = step.recorded()
    own: list[float] = []
    peer: list[float] = []
    for _ in range(ROUNDS):
        peer += samples_ms(peer_graph.replay, seconds / ROUNDS)
        own += samples_ms(own_graph.replay, seconds / ROUNDS)
    return {
        "bench": "training",
        "network": name,
        "batch": batch,
        "dtype": "bfloat16",
        "layout": "NHWC",
        "ours_ms": round(median(own), 3),
        "peer": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "peer_ms": round(median(peer), 3),
        "ours_eager_ms": round(min(own_eager), 3),
        "peer_alone_eager_ms": round(min(peer_eager), 3),
        "left_to_peer": left,
        "compile_s": round(compile_s, 1),
        "samples": len(own),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 32])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each way that is timed")
    parser.add_argument("--limit-s", type=float, default=600, help="begin nothing after so long")
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    options = parser.parse_args()
    started = time.monotonic()
    local = ours.Local()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    where = origin(torch.cuda.get_device_name(), versions)
    where |= {"git_sha": options.git_sha} if options.git_sha else {}
    # Clips of 16 frames at 112x112 are measured at batch 32 alone.
    steps = (
        (name, 32 if name == "r3d_18" else batch)
        for batch in options.batches
        for name in options.networks
    )
    wanted = list(dict.fromkeys(steps))
    context = multiprocessing.get_context("spawn")
    alone, requests = context.Pipe()
    process = context.Process(target=time_alone, args=(requests,), daemon=True)
    process.start()
    for name, batch in wanted:
        if time.monotonic() - started > options.limit_s:
            print("out of time before", name, batch)
            break
        row = {**measure(name, batch, options.seconds, local, alone), **where}
        eager = row["ours_eager_ms"], row["peer_alone_eager_ms"]
        print(
            f"{name:18} {batch:4} graph {row['ours_ms']:8.3f} / {row['peer_ms']:8.3f} ms "
            f"= {row['peer_ms'] / row['ours_ms']:.3f}x   eager {eager[0]:8.3f} / "
            f"{eager[1]:8.3f} = {eager[1] / eager[0]:.3f}x"
            f"   left {row['left_to_peer']}  compile {row['compile_s']} s",
            flush=True,
        )
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()
    alone.send(None)
    process.join()


if __name__ == "__main__":
    main()
