"""The windows of a pooling along one dimension: a range of input positions for each output.

Sliding and adaptive windows have one form, and so has the transposed relation of either (the
outputs whose windows contain an input position, which gradients sum over). So one kernel computes
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from convgrad_service.problems.lattice import count_below

__all__ = ["WindowAxis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAxis:
    """The window of output o is the range [``start(o)``, ``stop(o)``) of input positions.

        start(o) = max(low,  floor((o*step + first) / unit))
        stop(o)  = min(high, floor((o*step + last) / unit))

    Both are non-decreasing.

    Attributes
    ----------
    input, output : int
        The extents.
    low, high : int
        The range of the input, or of the padded input where positions are counted for a divisor.
    taps, valid_taps : int
        The number of positions of all windows, with and without padding.
    """

    input: int
    output: int
    step: int
    first: int
    last: int
    unit: int
    low: int
    high: int
    taps: int
    valid_taps: int

    @classmethod
    def sliding(cls, input: int, output: int, kernel: int, stride: int, before: int) -> WindowAxis:
        """Return windows of ``kernel`` positions, ``stride`` apart, with ``before`` of padding."""
        if output == 1:
            # Any stride gives the one window, and a short one cannot overflow kernels' 32 bits.
            stride = min(stride, input)
        inside = count_below(input + before, output, stride, kernel, 1)
        return cls(
            input=input,
            output=output,
            step=stride,
            first=-before,
            last=kernel - before,
            unit=1,
            low=0,
            high=input,
            taps=output * kernel,
            valid_taps=inside - count_below(before, output, stride, kernel, 1),
        )

    @classmethod
    def adaptive(cls, input: int, output: int) -> WindowAxis:
        """Return PyTorch's windows [floor(o*input/output), ceil((o + 1)*input/output))."""
        if input % output == 0:
            return cls.sliding(input, output, input // output, input // output, 0)
        # Adjacent windows share a position unless the boundary between them is an integer.
        taps = input + output - gcd(input, output)
        return cls(
            input=input,
            output=output,
            step=input,
            first=0,
            last=input + output - 1,
            unit=output,
            low=0,
            high=input,
            taps=taps,
            valid_taps=taps,
        )

    def start(self, o: int) -> int:
        return max(self.low, (o * self.step + self.first) // self.unit)

    def stop(self, o: int) -> int:
        return min(self.high, (o * self.step + self.last) // self.unit)

    def counting_padding(self, before: int, after: int) -> WindowAxis:
        """Return the windows clamped to the padded input."""
        return replace(self, low=-before, high=self.input + after)

    def transposed(self) -> WindowAxis:
        """Return, as the window of each input position, the outputs whose windows contain it.

        start(o) <= i < stop(o) is o*step + first < (i + 1)*unit <= o*step + last, solved for o.
        """
        return replace(
            self,
            input=self.output,
            output=self.input,
            step=self.unit,
            first=self.unit - self.last + self.step - 1,
            last=self.unit - self.first + self.step - 1,
            unit=self.step,
            low=0,
            high=self.output,
        )

    @property
    def uniform_size(self) -> int | None:
        """The size of all windows; None if sizes may differ."""
        if self.output == 1:
            return self.stop(0) - self.start(0)
        if self.step % self.unit == 0:
            size = self.last // self.unit - self.first // self.unit
            whole = (
                self.first // self.unit >= self.low
                and ((self.output - 1) * self.step + self.last) // self.unit <= self.high
            )
            return size if whole else None
        if (
            self.unit % self.step == 0
            and self.first == 0
            and self.last == self.step + self.unit - 1
        ):
            return 1  # several outputs for every input position
        return None

    @property
    def is_identity(self) -> bool:
        """Whether each window o consists of position o."""
        return (
            self.input == self.output
            and self.step == self.unit
            and 0 <= self.first < self.unit <= self.last < 2 * self.unit
        )

    @property
    def is_whole(self) -> bool:
        """Whether there is one window, the whole input."""
        return self.output == 1 and (self.start(0), self.stop(0)) == (0, self.input)

    @property
    def is_broadcast(self) -> bool:
        """Whether there is one input position, which every window contains."""
        return self.input == 1 and self.start(self.output - 1) <= 0 < self.stop(0)
