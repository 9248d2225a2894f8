"""The training loop: Adam with a cosine schedule, in NumPy, with gradients from the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convgrad.demo.data import Digits, batches
from convgrad.demo.network import Array, Network, cross_entropy
from convgrad.demo.options import EPOCHS

__all__ = ["Adam", "Schedule", "Step", "evaluate", "train"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Training length and learning rate."""

    epochs: int = EPOCHS
    batch_size: int = 32
    learning_rate: float = 5e-3
    warmup_steps: int = 20

    def steps_per_epoch(self, images: int) -> int:
        return images // self.batch_size

    def steps(self, images: int) -> int:
        return self.epochs * self.steps_per_epoch(images)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step: a short warm-up, then cosine decay to zero."""
        climb = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * climb * 0.5 * (1 + float(np.cos(np.pi * step / steps)))


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a training step; ``test_accuracy`` is measured at the end of an epoch."""

    number: int
    epoch: int
    epochs: int
    loss: float
    train_accuracy: float
    test_accuracy: float | None


class Adam:
    """Adam (Kingma and Ba, 2015), updating the parameters in place."""

    def __init__(self, parameters: list[Array], *, beta1: float = 0.9, beta2: float = 0.999):
        self._parameters = parameters
        self._beta1, self._beta2 = beta1, beta2
        self._mean = [np.zeros_like(tensor) for tensor in parameters]
        self._square = [np.zeros_like(tensor) for tensor in parameters]
        self._step = 0

    def update(self, gradients: list[Array], rate: float) -> None:
        self._step += 1
        unbias1 = 1 - self._beta1**self._step
        unbias2 = 1 - self._beta2**self._step
        for tensor, gradient, mean, square in zip(
            self._parameters, gradients, self._mean, self._square, strict=True
        ):
            mean += (1 - self._beta1) * (gradient - mean)
            square += (1 - self._beta2) * (gradient * gradient - square)
            tensor -= rate * (mean / unbias1) / (np.sqrt(square / unbias2) + 1e-8)


def train(
    network: Network, digits: Digits, schedule: Schedule, rng: np.random.Generator
) -> Iterator[Step]:
    """Train, yielding every `Step`."""
    optimizer = Adam(network.parameters())
    per_epoch = schedule.steps_per_epoch(len(digits.train_labels))
    steps = schedule.steps(len(digits.train_labels))
    for epoch in range(schedule.epochs):
        epoch_batches = batches(digits.train_images, digits.train_labels, schedule.batch_size, rng)
        for index, (images, labels) in enumerate(epoch_batches):
            done = epoch * per_epoch + index
            logits = network.forward(images)
            losses, grad_logits = cross_entropy(logits, labels)
            network.backward(grad_logits)
            optimizer.update(network.gradients(), schedule.rate(done, steps))
            yield Step(
                number=done + 1,
                epoch=epoch + 1,
                epochs=schedule.epochs,
                loss=float(losses.mean()),
                train_accuracy=_accuracy(logits, labels),
                test_accuracy=evaluate(network, digits) if index == per_epoch - 1 else None,
            )


def evaluate(network: Network, digits: Digits) -> float:
    """Return the accuracy on the test images."""
    return _accuracy(network.forward(digits.test_images), digits.test_labels)


def _accuracy(logits: Array, labels: NDArray[np.int64]) -> float:
    return float((logits.argmax(axis=1) == labels).mean())
