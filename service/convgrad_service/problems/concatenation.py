"""A sum of two convolutions of equal sizes as one larger convolution.

Their operands are concatenated along the dimension that is reduced: the channels of each group.
That would make a depthwise convolution a grouped one, which has slower kernels; where it has fewer
than three spatial dimensions, its operands are concatenated along a new one instead, as two taps.
One convolution has one sum, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from convgrad_service.problems.geometry import ConvShape

__all__ = ["MAX_DIMENSIONS", "Concatenation", "concatenate"]

MAX_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class Concatenation:
    """The larger convolution, and how its operands are made.

    Attributes
    ----------
    by_taps : bool
        Operands have an additional outermost spatial dimension with one position for each product.
        Otherwise each group has the channels of the first product before those of the second:
        input channels of x and w, or output channels of y and w.
    reversed_taps : bool
        The weight has its two positions in the opposite order.
    """

    conv: ConvShape
    by_taps: bool
    reversed_taps: bool = False


def concatenate(conv: ConvShape, direction: Literal["fwd", "bwd_data"]) -> Concatenation:
    """Return the sum of two outputs, or of two gradients of the input, as one convolution."""
    depthwise = conv.groups > 1 and conv.in_channels == conv.out_channels == conv.groups
    if not depthwise or conv.ndim == MAX_DIMENSIONS:
        if direction == "fwd":
            return Concatenation(replace(conv, in_channels=2 * conv.in_channels), by_taps=False)
        return Concatenation(replace(conv, out_channels=2 * conv.out_channels), by_taps=False)
    # i = o + r - pad. Forward, output 0 reads inputs 0 and 1 at taps 0 and 1. Backward, input 0
    # gets outputs 0 and 1 at taps 1 and 0.
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
    return Concatenation(larger, by_taps=True, reversed_taps=not forward)
