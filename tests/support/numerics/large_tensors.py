"""Problems with tensors of more than 2^31 elements, whose answers are those of small ones.

A small problem's tensors stand side by side many times, along N or along H; where they do along H,
what meets the neighbours' rows is zeros. So each part of the answer is the small problem's, or of a
gradient of a weight the answer is as many times the small one's: every element can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.problems import Problem, problem_from
from tests.support.numerics.arrays import DTYPES, Arrays, draw, integers, rng_for
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.oracle import Answer
from tests.support.numerics.reference import Reference

__all__ = ["LARGE", "MORE_THAN", "LargeCase"]

MORE_THAN = 2**31
# What each dimension of a channels-last array of two dimensions is.
AXES = {"N": 0, "H": 1}
# Of a gradient of a weight: the largest sum of magnitudes that float32 adds up exactly, by far.
EXACT = 2**22


@dataclass(frozen=True)
class LargeCase:
    """A small convolution, how many of it stand along which axis, and the kernel that a plan for an
    H200 takes. Along H the padding is what keeps the sizes' ratio the stride."""

    operation: str
    conv: Conv
    copies: int
    kernel: str
    along: str = "N"
    dtype: str = "float16"
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def of_weight(self) -> bool:
        return self.operation == "grouped_conv_bwd_weight"

    @property
    def large_conv(self) -> Conv:
        if self.along == "N":
            return replace(self.conv, n=self.conv.n * self.copies)
        height, width = self.conv.size
        return replace(self.conv, size=(height * self.copies, width))

    @property
    def elements(self) -> int:
        """Of the largest tensor."""
        conv = self.large_conv
        return max(prod(conv.input_shape), prod(conv.output_shape))

    @property
    def tensor_bytes(self) -> int:
        conv = self.large_conv
        both = prod(conv.input_shape) + prod(conv.output_shape)
        return both * DTYPES[self.dtype].itemsize

    def case(self, conv: Conv) -> Case:
        made = FROM_CONV[self.operation](self.kernel, conv)
        params = {**made.params, **self.params}
        # What a bias takes is little, and other kernels.
        shapes = {name: shape for name, shape in made.shapes.items() if name != "bias"}
        return replace(made, shapes=shapes, params=params)

    def problem(self) -> Problem:
        """Of arrays that take no memory."""
        item = np.zeros((), DTYPES[self.dtype])
        shapes = self.case(self.large_conv).shapes
        arrays = {name: np.broadcast_to(item, _last(shape)) for name, shape in shapes.items()}
        return self.stated(arrays)[0]

    def stated(self, arrays: Arrays) -> tuple[Problem, Arrays]:
        """The large problem, and its tensors as a backend takes them."""
        params = self.case(self.large_conv).params
        fields = {**arrays, **params, "layout": "NHWC"}
        request = validate(OPERATIONS[self.operation].request, fields)
        return problem_from(self.operation, request), request.tensors()

    def small(self, seed: int) -> Arrays:
        """The small problem's tensors, channels first."""
        case = self.case(self.conv)
        tensors = draw(case, rng_for(seed, case.id), DTYPES[self.dtype], integers)
        if self.along == "H":
            name = "input" if self.operation == "conv_fwd" else "grad_output"
            margin = self.conv.kernel[0]
            tensors[name][:, :, :margin] = tensors[name][:, :, -margin:] = 0
        if self.of_weight:
            # As few pixels as the sums of all copies allow.
            few = EXACT / (4 * self.copies * prod(tensors["grad_output"].shape[2:]) * self.conv.n)
            y = tensors["grad_output"]
            y *= (rng_for(seed, case.id, "few").random(y.shape) < few).astype(y.dtype)
        return tensors

    def large(self, small: Arrays) -> Arrays:
        """The large problem's, channels last."""
        times = [1, 1, 1, 1]
        times[AXES[self.along]] = self.copies
        return {
            name: np.tile(np.moveaxis(array, 1, -1), [1] * 4 if name == "weight" else times)
            for name, array in small.items()
        }

    def check(self, found: Arrays, wanted: Answer) -> None:
        """Every element of the large problem's outputs, by what the small one must give."""
        for name, array in found.items():
            reference = wanted[name]
            assert isinstance(reference, Reference)
            value = np.moveaxis(reference.value, 1, -1) if array.ndim > 1 else reference.value
            if self.of_weight:
                assert (array == (value * self.copies).astype(array.dtype)).all(), name
                continue
            axis = AXES[self.along]
            parts = np.moveaxis(array, axis, 0)
            value = np.moveaxis(value.astype(array.dtype), axis, 0)
            assert len(parts) == len(value) * self.copies
            for first in range(0, len(parts), len(value)):
                assert (parts[first : first + len(value)] == value).all(), (name, first)


def _last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1])


FIRST = Conv(3, 3, 64, (56, 56), (7, 7), 2, 3)
DATA, WEIGHT = "conv_bwd_data", "grouped_conv_bwd_weight"
# So that sums of integers come out exact.
WIDE = {"weight_dtype": "float32"}


def depthwise(channels: int, kernel: int) -> Conv:
    return Conv(3, channels, channels, (56, 56), (kernel, kernel), 1, kernel // 2, groups=channels)


LARGE = {
    "first_data": LargeCase(DATA, FIRST, 14_400, "hopper_first_data"),
    "first_data_high": LargeCase(
        DATA, FIRST, 14_400, "hopper_first_data", dtype="float32", params={"precision": "high"}
    ),
    "first_data_highest": LargeCase(DATA, FIRST, 14_400, "hopper_first_data", dtype="float32"),
    "first_taps": LargeCase(WEIGHT, FIRST, 14_400, "hopper_first_taps", params=WIDE),
    "first_taps_of_one_image": LargeCase(
        WEIGHT, replace(FIRST, n=1), 43_200, "hopper_first_taps", "H", params=WIDE
    ),
    "first_weight": LargeCase(WEIGHT, FIRST, 14_400, "first_weight", dtype="float32"),
    "pairs": LargeCase(DATA, depthwise(256, 5), 900, "depthwise_pairs"),
    "pairs_forward": LargeCase("conv_fwd", depthwise(256, 7), 900, "depthwise_pairs"),
    "weight_direct": LargeCase(
        WEIGHT, depthwise(256, 3), 900, "depthwise_weight_direct", params=WIDE
    ),
    "weight_mma": LargeCase(WEIGHT, depthwise(256, 7), 900, "depthwise_weight_mma", params=WIDE),
    "grouped_weight": LargeCase(
        WEIGHT,
        Conv(3, 256, 256, (56, 56), (3, 3), 1, 1, groups=32),
        900,
        "hopper_grouped_weight",
        params=WIDE,
    ),
    "grouped_weight_of_one_image": LargeCase(
        WEIGHT,
        Conv(1, 256, 256, (56, 56), (3, 3), 1, 1, groups=32),
        2_700,
        "hopper_grouped_weight",
        "H",
        params=WIDE,
    ),
    "weight": LargeCase(
        WEIGHT, Conv(3, 256, 256, (28, 28), (3, 3), 1, 1), 3_600, "hopper_weight", params=WIDE
    ),
    "weight_of_one_image": LargeCase(
        WEIGHT,
        Conv(1, 256, 256, (28, 28), (3, 3), 1, 1),
        10_800,
        "hopper_weight",
        "H",
        params=WIDE,
    ),
    "gather": LargeCase(DATA, Conv(3, 256, 256, (28, 28), (3, 3), 2, 1), 3_600, "hopper_gather"),
    "gather_of_one_image": LargeCase(
        "conv_fwd", Conv(1, 256, 256, (28, 28), (3, 3), 1, 1), 10_800, "hopper_gather", "H"
    ),
    # Channels in no whole chunks are copied to rows that are.
    "rows_copied": LargeCase(
        "conv_fwd", Conv(3, 252, 256, (28, 28), (3, 3), 1, 1), 3_700, "hopper_gather"
    ),
}
"""By what they are for."""
