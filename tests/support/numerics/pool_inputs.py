"""Inputs of max pooling: with NaNs and infinities, and backward passes from indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.numerics.arrays import (
    Arrays,
    integers,
)
from tests.support.numerics.cases import Case
from tests.support.numerics.reference_pool import maxpool_fwd


def with_nans(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Few different integers, so many ties, with NaNs and infinities strewn among them."""
    array = integers(rng, shape, np.dtype(np.float64))
    strewn = rng.random(shape)
    for low, value in ((0.9, np.nan), (0.86, np.inf), (0.75, -np.inf)):
        array[(strewn > low) & (strewn < low + 0.05)] = value
    return array.astype(dtype)


def sources(case: Case, tensors: Arrays) -> dict[str, tuple[Case, Arrays]]:
    """The backward from the input, and from indices of either width."""
    size = tensors["input"].shape[2:]
    _, indices = maxpool_fwd(tensors["input"], **case.params)
    given = {"input": (case, tensors)}
    for width in (np.int64, np.int32):
        from_indices = {"grad_output": tensors["grad_output"], "indices": indices.astype(width)}
        given[np.dtype(width).name] = (case.with_params("i", input_size=size), from_indices)
    return given


def bad_indices(
    rng: np.random.Generator, case: Case, good: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Return indices with one wrong: beyond the plane, negative, or outside its window."""
    plane = int(np.prod(case.shapes["input"][2:]))
    wrong = {"plane": plane, "negative": -1, "least": -(2**31), "most": 2**31 - 1}
    # The last element of the plane is not in the first window of these poolings.
    made = {}
    for name, value in wrong.items():
        made[name] = good.copy()
        made[name].flat[rng.integers(good.size)] = value
    if good.dtype == np.int64:
        made["its low half"] = good.copy()
        made["its low half"].flat[rng.integers(good.size)] += 2**32
    made["outside its window"] = good.copy()
    made["outside its window"].reshape(*good.shape[:2], -1)[:, :, 0] = plane - 1
    return made
