"""Named tuples returned by operations that can have several outputs.

Such an operation always returns its tuple; outputs that were not requested are None. The type
parameters tell a type checker which outputs are present.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgrad._display import fields_text, html_table

__all__ = [
    "Array",
    "ConvBackwardResult",
    "ConvDoubleBackwardResult",
    "ConvWeightResult",
    "IndexArray",
    "MaxPoolResult",
]

Array: TypeAlias = NDArray[Any]
IndexArray: TypeAlias = NDArray[np.integer[Any]]
OutputT = TypeVar("OutputT", bound=Array | None, covariant=True)
InputT = TypeVar("InputT", bound=Array | None, covariant=True)
WeightT = TypeVar("WeightT", bound=Array | None, covariant=True)
BiasT = TypeVar("BiasT", bound=Array | None, covariant=True)
IndicesT = TypeVar("IndicesT", bound=IndexArray | None, covariant=True)


class ConvBackwardResult(NamedTuple, Generic[InputT, WeightT, BiasT]):
    """The gradients of one convolution, in the order of PyTorch's convolution_backward."""

    grad_input: InputT
    grad_weight: WeightT
    grad_bias: BiasT

    def __repr__(self) -> str:
        return fields_text(type(self).__name__, self._asdict().items())

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._asdict().items())


class ConvDoubleBackwardResult(NamedTuple, Generic[OutputT, InputT, WeightT]):
    """The gradients of a backward pass, in the order of PyTorch's _convolution_double_backward."""

    grad_grad_output: OutputT
    grad_input: InputT
    grad_weight: WeightT

    def __repr__(self) -> str:
        return fields_text(type(self).__name__, self._asdict().items())

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._asdict().items())


class ConvWeightResult(NamedTuple, Generic[WeightT, BiasT]):
    """The gradients of a convolution's parameters."""

    grad_weight: WeightT
    grad_bias: BiasT

    def __repr__(self) -> str:
        return fields_text(type(self).__name__, self._asdict().items())

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._asdict().items())


class MaxPoolResult(NamedTuple, Generic[IndicesT]):
    """The maxima and their indices: flat positions in each (n, c) plane of the input."""

    output: Array
    indices: IndicesT

    def __repr__(self) -> str:
        return fields_text(type(self).__name__, self._asdict().items())

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._asdict().items())
