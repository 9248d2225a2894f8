"""scikit-learn's bundled handwritten digits: 1,797 images of 8 x 8, without a download."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

__all__ = ["CLASSES", "Digits", "batches", "digits"]

CLASSES = 10
_SPLIT_SEED = 0
_TEST_SHARE = 4  # one image in four is a test image
_BRIGHTEST = 16.0


@dataclass(frozen=True, slots=True)
class Digits:
    """Images (N, 1, 8, 8) in float32 between 0 and 1, and their labels."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def digits() -> Digits:
    """Load the digits with a fixed, stratified split."""
    source: Any = load_digits()
    images = (source.images[:, None] / _BRIGHTEST).astype(np.float32)
    labels = source.target.astype(np.int64)
    rng = np.random.default_rng(_SPLIT_SEED)
    in_test = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        in_test[members[: len(members) // _TEST_SHARE]] = True
    return Digits(images[~in_test], labels[~in_test], images[in_test], labels[in_test])


def batches(
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
    batch_size: int,
    rng: np.random.Generator,
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Yield one epoch in random order, with half of the images shifted by up to one pixel.

    An incomplete last batch is skipped.
    """
    order = rng.permutation(len(labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield _jittered(images[chosen], rng), labels[chosen]


def _jittered(images: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    count, _, height, width = images.shape
    shifts = rng.integers(-1, 2, size=(count, 2)) * rng.integers(0, 2, size=(count, 1))
    framed = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    moved = [
        framed[n, :, 1 + down : 1 + down + height, 1 + right : 1 + right + width]
        for n, (down, right) in enumerate(shifts)
    ]
    return np.stack(moved)
