"""A training loop in PyTorch whose convolution and pooling gradients a server computes."""

from __future__ import annotations

import os

import torch
from torch import nn

import convgrad.torch

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 8 * 8, 2),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# Is the brighter half of the image the upper one or the lower one?
images = torch.randn(64, 1, 16, 16)
labels = (images[:, :, :8].mean((1, 2, 3)) > images[:, :, 8:].mean((1, 2, 3))).long()

remote = convgrad.torch.Remote(os.environ.get("CONVGRAD_URL", "http://127.0.0.1:8000"))
losses = []
with convgrad.torch.use(remote):
    for _ in range(25):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # asks the server
        optimizer.step()
        losses.append(loss.item())
remote.close()

print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
print(convgrad.torch.report())
