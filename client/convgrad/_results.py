"""What operations with more than one output return.

An operation that can give several outputs always returns its tuple, whatever was asked, so the
type of a result never hangs on the value of an argument; outputs not asked for are None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ConvBackwardResult", "ConvWeightResult", "MaxPoolResult"]


class ConvBackwardResult(NamedTuple):
    """The gradients of one convolution, in the order of PyTorch's convolution_backward."""

    grad_input: NDArray[Any] | None
    grad_weight: NDArray[Any] | None
    grad_bias: NDArray[Any] | None


class ConvWeightResult(NamedTuple):
    """The gradients of a convolution's parameters."""

    grad_weight: NDArray[Any] | None
    grad_bias: NDArray[Any] | None


class MaxPoolResult(NamedTuple):
    """The maxima, and where they were found: flat positions in each (n, c) plane of the input."""

    output: NDArray[Any]
    indices: NDArray[np.integer[Any]] | None
