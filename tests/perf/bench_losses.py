"""Losses of a ResNet-50 over 200 steps: PyTorch's own runs, and one with `use(Local())`.

PyTorch's runs differ in the order of their sums alone: atomic additions, the algorithms that cuDNN
chooses, the order of the images in each batch. bfloat16 autocast, channels last, fused SGD; images
are drawn around ten prototypes. Appends one record with the curves and their distances::

    python -m tests.perf.bench_losses --out losses.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import torchvision

import convgrad.torch as ours
from tests.perf.provenance import origin

STEPS, BATCH, SIZE, CLASSES = 200, 64, 64, 10
# The rate rises over the first steps, as is usual: without that the losses grow before they fall.
RATE, WARM_UP = 0.005, 50
PEERS: dict[str, dict[str, Any]] = {
    "PyTorch": {},
    "again": {},
    "cudnn.benchmark": {"benchmark": True},
    "batches rolled by 1": {"roll": 1},
    "batches rolled by 21": {"roll": 21},
    "batches in reverse": {"reverse": True},
}


def train(
    device: str, steps: int, *, benchmark: bool = False, reverse: bool = False, roll: int = 0
) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = benchmark
    model = torchvision.models.resnet50(num_classes=CLASSES, zero_init_residual=True).to(device)
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    drawn = torch.Generator().manual_seed(1)
    prototypes = torch.randn(CLASSES, 3, SIZE, SIZE, generator=drawn)
    losses = []
    for _ in range(steps):
        labels = torch.randint(0, CLASSES, (BATCH,), generator=drawn)
        noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=drawn)
        images = 0.3 * prototypes[labels] + noise
        if reverse:
            images, labels = images.flip(0), labels.flip(0)
        images, labels = images.roll(roll, 0), labels.roll(roll, 0)
        x = images.to(device).to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), labels.to(device))
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(loss.detach())
    return [round(float(loss), 5) for loss in losses]


def distance(a: list[float], b: list[float]) -> float:
    """Return the root mean square difference of two loss curves."""
    return float((torch.tensor(a) - torch.tensor(b)).square().mean().sqrt())


def measure(device: str = "cuda", steps: int = STEPS) -> dict[str, Any]:
    curves = {name: train(device, steps, **options) for name, options in PEERS.items()}
    with ours.use(ours.Local(), fallback=False):
        own = train(device, steps)
    pairs = itertools.combinations(curves.values(), 2)
    apart = [distance(own, curve) for curve in curves.values()]
    return {
        "bench": "losses",
        "network": "resnet50",
        "batch": BATCH,
        "steps": steps,
        "peer_spread": round(max(distance(a, b) for a, b in pairs), 5),
        "apart": round(min(apart), 5),
        "apart_most": round(max(apart), 5),
        "ours": own,
        "peers": curves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    options = parser.parse_args()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    where = origin(torch.cuda.get_device_name(), versions)
    where |= {"git_sha": options.git_sha} if options.git_sha else {}
    row = {**measure(), **where}
    for name, curve in {**row["peers"], "ours": row["ours"]}.items():
        last = sum(curve[-20:]) / 20
        print(f"{name:20} {curve[0]:.4f} {curve[9]:.4f} {curve[49]:.4f}, last 20 steps {last:.4f}")
    print(
        f"PyTorch's runs differ by up to {row['peer_spread']}; ours from the nearest of them by "
        f"{row['apart']}, from the farthest by {row['apart_most']}"
    )
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
