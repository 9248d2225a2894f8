"""A sum of two products of one convolution as one product of a larger one.

Both products are of the same sizes, so their operands are joined along what is summed over: the
channels of each group. Depthwise convolutions would lose their kernels by that; where there is a
dimension to spare they are joined along it, as two taps. One product has one sum, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from convgrad_service.problems.geometry import ConvShape

__all__ = ["MOST_DIMENSIONS", "Joined", "joined"]

MOST_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class Joined:
    """The larger convolution.

    ``by_taps``: each operand has one more spatial dimension, the outermost, with a position for
    each product; in the weight in the opposite order where ``reversed_taps``. Otherwise it has the
    channels of the first product before those of the second, in each group: input channels of x
    and w, output channels of y and w.
    """

    conv: ConvShape
    by_taps: bool
    reversed_taps: bool = False


def joined(conv: ConvShape, direction: Literal["fwd", "bwd_data"]) -> Joined:
    """The sum of two outputs, or of two gradients of the input, as one."""
    depthwise = conv.groups > 1 and conv.in_channels == conv.out_channels == conv.groups
    if not depthwise or conv.ndim == MOST_DIMENSIONS:
        if direction == "fwd":
            return Joined(replace(conv, in_channels=2 * conv.in_channels), False)
        return Joined(replace(conv, out_channels=2 * conv.out_channels), False)
    # i = o + r - pad. Forward, output 0 meets inputs 0 and 1 at taps 0 and 1. Backward, input 0
    # meets outputs 0 and 1 at taps 1 and 0.
    forward = direction == "fwd"
    pad = 0 if forward else 1
    larger = replace(
        conv,
        input_size=(2 if forward else 1, *conv.input_size),
        kernel_size=(2, *conv.kernel_size),
        output_size=(1 if forward else 2, *conv.output_size),
        stride=(1, *conv.stride),
        padding=((pad, pad), *conv.padding),
        dilation=(1, *conv.dilation),
    )
    return Joined(larger, True, reversed_taps=not forward)
