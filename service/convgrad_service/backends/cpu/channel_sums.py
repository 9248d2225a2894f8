"""The gradient of a bias: the sum of grad_output over samples and positions, per channel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["channel_sums"]


def channel_sums(grad_output: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of a canonical view (N, G, K/G, *spatial) as (K,), in float64.

    Sample after sample in a fixed order, so that equal inputs give equal bits.
    """
    total = np.zeros(grad_output.shape[1:3], np.float64)
    spatial = tuple(range(2, grad_output.ndim - 1))
    with np.errstate(invalid="ignore", over="ignore"):
        for sample in grad_output:
            total += np.sum(sample, axis=spatial, dtype=np.float64)
    return total.reshape(-1)
