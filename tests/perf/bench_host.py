"""What a backward pass costs the host: by PyTorch alone and with `convgrad.torch.use(Local())`.

The time between calls of ATen's operators that are launched one after another, without waiting for
the GPU. Shapes are small, so that the GPU never has work for longer than the host prepares it; the
long one's kernels run side by side::

    python -m tests.perf.bench_host --out host.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import convgrad.torch as ours
from convgrad.torch import _report
from tests.perf.provenance import cpu_model, origin

ATEN = torch.ops.aten
# Calls between two waits for the GPU; its queue takes about a thousand launches.
CALLS, ROUNDS = 20, 60
Call = Callable[[], Any]


def calls(device: str = "cuda") -> dict[str, Call]:
    """Backward passes of small layers, by name."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )

    x = draw(4, 64, 14, 14)
    w1, w3, w7 = draw(64, 64, 1, 1), draw(64, 64, 3, 3), draw(64, 1, 7, 7)
    output, indices = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    mean = torch.nn.functional.adaptive_avg_pool2d(x, 1)

    def conv(weight: torch.Tensor, mask: list[bool], groups: int = 1, x: torch.Tensor = x) -> Call:
        pad, like = weight.shape[2] // 2, torch.ones_like(x)
        rest = [1, 1], [pad, pad], [1, 1], False, [0, 0], groups, mask
        return lambda: ATEN.convolution_backward(like, x, weight, [len(weight)], *rest)

    large = draw(16, 256, 28, 28)

    window = [3, 3], [2, 2], [1, 1]
    return {
        "conv 1x1, grad_input": conv(w1, [True, False, False]),
        "conv 1x1, grad_weight": conv(w1, [False, True, False]),
        "conv 1x1": conv(w1, [True, True, False]),
        "conv 3x3": conv(w3, [True, True, False]),
        "conv 3x3, with bias": conv(w3, [True, True, True]),
        "long conv 3x3, with bias": conv(draw(256, 256, 3, 3), [True, True, True], x=large),
        "conv 7x7 depthwise": conv(w7, [True, True, False], 64),
        "max_pool2d 3x3": lambda: ATEN.max_pool2d_with_indices_backward(
            output, x, *window, [1, 1], False, indices
        ),
        "avg_pool2d 3x3": lambda: ATEN.avg_pool2d_backward(output, x, *window, False, True, None),
        "adaptive_avg_pool2d 1": lambda: ATEN._adaptive_avg_pool2d_backward(mean, x),
    }


def host_us(call: Call, kept: int) -> float:
    """Return the time between calls.

    The latest ``kept`` results stay alive, so that the allocator gives the next call other
    addresses.
    """
    alive: deque[Any] = deque(maxlen=kept)
    call()
    synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        alive.append(call())
    took = time.perf_counter() - started
    synchronize()
    return took / CALLS * 1e6


def inside_us() -> float:
    """Return the mean time from our kernel's entry to its return, of calls answered natively."""
    entries = [each for counter in _report._COUNTERS for each in counter.native]
    calls = sum(each.calls for each in entries)
    total = sum(each.nanoseconds for each in entries) / 1e3
    for each in entries:
        each.calls = each.nanoseconds = 0
    return total / calls if calls else float("nan")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peer_times(every: dict[str, Call]) -> dict[str, list[float]]:
    """Time PyTorch alone. Before the first `use`, which puts our kernels in front of its own."""
    found: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(2 + ROUNDS):
        for name, call in every.items():
            found[name].append(host_us(call, 0))
    return found


def measure(name: str, call: Call, local: ours.Backend, peer: list[float]) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        "ours_us": lambda: host_us(call, 0),
        "inside_us": inside_us,  # of the calls before
        "other_addresses_us": lambda: host_us(call, 7),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with ours.use(local, fallback=False):
        for _ in range(2 + ROUNDS):  # in turn: the machine's speed drifts
            for name_of, way in ways.items():
                found[name_of].append(way())
            inside_us()
    found["peer_us"] = peer
    return {
        "bench": "host",
        "call": name,
        **{way: round(statistics.median(times[2:]), 2) for way, times in found.items()},
        "least_us": {way: round(min(times[2:]), 2) for way, times in found.items()},
        "peer": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    options = parser.parse_args()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    where = origin(torch.cuda.get_device_name(), versions) | {"cpu": cpu_model()}
    where |= {"git_sha": options.git_sha} if options.git_sha else {}
    print("host us of a call: ours (other addresses; inside our kernel) / PyTorch's own")
    every = calls()
    peers, local = peer_times(every), ours.Local()
    for name, call in every.items():
        row = {**measure(name, call, local, peers[name]), **where}
        for said, us in (("median", row), ("least", row["least_us"])):
            print(
                f"{name:24} {said:6} {us['ours_us']:6.2f} ({us['other_addresses_us']:6.2f}; "
                f"{us['inside_us']:5.2f}) / {us['peer_us']:6.2f}",
                flush=True,
            )
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
