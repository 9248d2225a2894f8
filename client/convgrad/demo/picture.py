"""The demo's picture: training curves, learned filters, and gradients as images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray

from convgrad.demo.data import CLASSES, Digits
from convgrad.demo.network import Array, Network, cross_entropy
from convgrad.demo.training import Step

__all__ = ["draw_picture"]

_BLUE, _ORANGE, _RED = "#2463a6", "#d97b1c", "#c0392b"
_INK, _GREY = "#222222", "#667080"
_SMOOTHING_STEPS = 15


def draw_picture(
    path: Path, network: Network, digits: Digits, steps: Sequence[Step], target: float
) -> None:
    """Draw and write the picture, requesting its gradients from the server."""
    figure = Figure(figsize=(12, 6.8), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06, hspace=0.02)
    rows: Any = figure.subfigures(2, 1, height_ratios=(1.3, 1))
    columns: Any = rows[0].subfigures(1, 2, width_ratios=(2.5, 1))
    _draw_curves(columns[0], steps, target)
    _draw_filters(columns[1], network.convolutions[0].weight)
    _draw_gradients(rows[1], network, digits)
    figure.savefig(path, dpi=130)


def _draw_curves(figure: SubFigure, steps: Sequence[Step], target: float) -> None:
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    numbers = np.array([step.number for step in steps])
    losses = np.array([step.loss for step in steps])
    loss_axes.plot(numbers, losses, color=_BLUE, alpha=0.25, linewidth=0.8)
    if len(steps) > _SMOOTHING_STEPS:
        kernel = np.ones(_SMOOTHING_STEPS) / _SMOOTHING_STEPS
        smoothed = np.convolve(losses, kernel, mode="valid")
        middle = _SMOOTHING_STEPS // 2
        loss_axes.plot(numbers[middle : middle + len(smoothed)], smoothed, color=_BLUE)
    loss_axes.set_yscale("log")
    _dress(loss_axes, "Training loss", "step")

    measured = [
        (step.epoch, step.test_accuracy) for step in steps if step.test_accuracy is not None
    ]
    epochs = [epoch for epoch, _ in measured]
    percent = [100 * accuracy for _, accuracy in measured]
    accuracy_axes.axhline(100 * target, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    accuracy_axes.plot(epochs, percent, color=_ORANGE, marker="o", markersize=4)
    if percent:
        accuracy_axes.annotate(
            f"{percent[-1]:.1f} %",
            (epochs[-1], percent[-1]),
            xytext=(0, -16),
            textcoords="offset points",
            ha="right",
            color=_ORANGE,
            weight="bold",
        )
    accuracy_axes.xaxis.get_major_locator().set_params(integer=True)
    _dress(accuracy_axes, f"Test accuracy, % (dashed: {100 * target:.0f})", "epoch")


def _draw_filters(figure: SubFigure, weight: Array) -> None:
    figure.suptitle("First layer's filters", fontsize=11, color=_INK)
    side = int(np.ceil(np.sqrt(len(weight))))
    limit = float(np.abs(weight).max())
    for axes, kernel in zip(figure.subplots(side, side).flat, weight[:, 0], strict=False):
        _image(axes, kernel, cmap="RdBu_r", limits=(-limit, limit))


def _draw_gradients(figure: SubFigure, network: Network, digits: Digits) -> None:
    """Draw the hardest test image of each class, above ∂loss/∂image."""
    figure.suptitle(
        "The test image of each digit that is hardest to read, and ∂loss/∂image from the server "
        "(more ink on red raises the loss, on blue lowers it)",
        fontsize=11,
        color=_INK,
    )
    losses, _ = cross_entropy(network.forward(digits.test_images), digits.test_labels)
    hardest = np.array(
        [
            np.where(digits.test_labels == label, losses, -np.inf).argmax()
            for label in range(CLASSES)
        ]
    )
    images, labels = digits.test_images[hardest], digits.test_labels[hardest]
    logits = network.forward(images)
    _, grad_logits = cross_entropy(logits, labels)
    gradients = network.backward(grad_logits)
    axes: NDArray[Any] = figure.subplots(2, CLASSES)
    axes[0, 0].set_ylabel("image", color=_GREY)
    axes[1, 0].set_ylabel("∂loss/∂image", color=_GREY)
    for column, (image, gradient, read) in enumerate(
        zip(images[:, 0], gradients[:, 0], logits.argmax(axis=1), strict=True)
    ):
        right = read == labels[column]
        _image(axes[0, column], image, cmap="gray_r", limits=(0, 1))
        axes[0, column].set_title(
            f"{labels[column]}" if right else f"{labels[column]}, read as {read}",
            fontsize=9,
            color=_GREY if right else _RED,
        )
        limit = float(np.abs(gradient).max()) or 1.0
        _image(axes[1, column], gradient, cmap="RdBu_r", limits=(-limit, limit))


def _image(axes: Any, image: Array, *, cmap: str, limits: tuple[float, float]) -> None:
    axes.imshow(image, cmap=cmap, vmin=limits[0], vmax=limits[1])
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#d5d9de")


def _dress(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11, color=_INK, loc="left")
    axes.set_xlabel(label, color=_GREY)
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.grid(color="#e7eaee", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c5cad1")
