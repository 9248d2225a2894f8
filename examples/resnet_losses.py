"""Train the same ResNet with `convgrad.torch.use(Local())` and without, and plot the losses.

PyTorch's own runs differ from each other only in the order of sums: one or two threads, the images
of each batch in reverse order, channels last::

    python examples/resnet_losses.py [resnet-losses.png]
"""

from __future__ import annotations

import contextlib
import itertools
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import convgrad.torch

STEPS, BATCH = 200, 32


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Block(8, 16, 1),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def train(threads: int = 1, reverse: bool = False, channels_last: bool = False) -> torch.Tensor:
    """Return the loss of each step."""
    torch.set_num_threads(threads)
    digits = load_digits()
    memory = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    model = resnet().to(memory_format=memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    batches = order.repeat(4)[: STEPS * BATCH].split(BATCH)
    losses = []
    for picked in batches:
        optimizer.zero_grad()
        rows = picked.flip(0) if reverse else picked
        loss = nn.functional.cross_entropy(
            model(images[rows].to(memory_format=memory)), labels[rows]
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the root mean square difference of two loss curves."""
    return float((a - b).square().mean().sqrt())


pytorch = [
    train(),
    train(threads=2),
    train(reverse=True),
    train(channels_last=True),
]
with convgrad.torch.use(convgrad.torch.Local(), fallback=False):
    ours = train()
spread = max(distance(a, b) for a, b in itertools.combinations(pytorch, 2))
apart = min(distance(ours, each) for each in pytorch)
print(convgrad.torch.report())
print(f"loss with convgrad: {ours[0]:.4f} to {ours[-20:].mean():.4f}")
print(f"loss with PyTorch:  {pytorch[0][0]:.4f} to {pytorch[0][-20:].mean():.4f}")
print(f"PyTorch's runs differ by up to {spread:.1e}; convgrad's from the nearest by {apart:.1e}")

with contextlib.suppress(IndexError):
    path = sys.argv[1]
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for index, losses in enumerate(pytorch):
        axes.plot(losses, color="0.6", lw=2.5, label="PyTorch, 4 runs" if index == 0 else None)
    axes.plot(ours, color="tab:blue", lw=0.9, label="with convgrad.torch.use(Local())")
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="ResNet on digits, CPU, float32")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
