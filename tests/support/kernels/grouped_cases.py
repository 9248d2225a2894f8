"""Grouped convolutions of few channels per group: how the grouped tensor-core kernels differ."""

from __future__ import annotations

from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv

__all__ = ["GROUPED", "NOT_FINITE", "grouped_cases"]

GROUPED: dict[str, Conv] = {
    # Channels a group, on both sides
    "c2": Conv(2, 16, 16, (6, 7), (3, 3), padding=1, groups=8),
    "c4": Conv(2, 32, 32, (7, 9), (3, 3), padding=1, groups=8),
    "c4_to_2": Conv(1, 32, 16, (5, 6), (3, 3), padding=1, groups=8),
    "c6": Conv(1, 48, 48, (5, 7), (3, 3), padding=1, groups=8),
    "c8": Conv(3, 32, 32, (8, 7), (3, 3), padding=1, groups=4),
    "c8_to_4_three_merges": Conv(1, 48, 24, (4, 5), (3, 3), padding=1, groups=6),
    "c8_to_24": Conv(1, 16, 48, (4, 5), (2, 3), padding=1, groups=2),
    "c12_seven_merges": Conv(1, 168, 168, (4, 3), (3, 3), padding=1, groups=14),
    "c12_three_merges": Conv(1, 72, 72, (4, 3), (3, 3), padding=1, groups=6),
    "c16": Conv(2, 48, 48, (7, 6), (3, 3), padding=1, groups=3),
    "c24": Conv(1, 48, 48, (5, 6), (3, 3), padding=1, groups=2),
    "c32": Conv(2, 64, 64, (7, 7), (3, 3), padding=1, groups=2),
    "c40_to_56": Conv(1, 80, 112, (3, 4), (3, 3), padding=1, groups=2),
    "c64_to_8": Conv(1, 128, 16, (4, 5), (3, 3), padding=1, groups=2),
    # Padded in shared memory: copied in pieces of 2, 4 and 8 bytes, or because of all channels
    "c3_pairs": Conv(2, 24, 24, (6, 7), (3, 3), padding=1, groups=8),
    "c5": Conv(1, 35, 35, (5, 7), (3, 3), padding=1, groups=7),
    "c6_seven": Conv(2, 42, 42, (7, 9), (3, 3), 2, 1, groups=7),
    "c10": Conv(1, 40, 40, (5, 7), (3, 3), padding=1, groups=4),
    "c20_to_28": Conv(1, 60, 84, (5, 7), (3, 3), padding=1, groups=3),
    "c27_to_9": Conv(1, 81, 27, (5, 6), (3, 3), 2, 1, groups=3),
    "c4_three": Conv(2, 12, 12, (7, 9), (3, 3), padding=1, groups=3),
    # Geometry
    "c8_strided": Conv(2, 16, 16, (11, 9), (3, 3), 2, 1, groups=2),
    "c4_strided_3_by_2": Conv(1, 16, 16, (11, 10), (4, 5), (3, 2), 2, groups=4),
    "c16_dilated": Conv(1, 32, 32, (9, 11), (3, 3), padding=4, dilation=(4, 2), groups=2),
    "c8_strided_and_dilated": Conv(1, 16, 16, (13, 14), (3, 2), 2, 3, 3, groups=2),
    "c8_factor_shared": Conv(1, 16, 16, (13, 14), (3, 3), 4, 3, 6, groups=2),
    "c4_stride_beyond_kernel": Conv(2, 8, 16, (11, 13), (2, 2), 3, groups=2),
    "c8_padding_beyond": Conv(1, 16, 16, (5, 4), (3, 3), padding=((4, 0), (1, 5)), groups=2),
    "c8_pointwise": Conv(2, 16, 24, (5, 6), (1, 1), groups=2),
    "c4_rows_left_over": Conv(1, 16, 16, (12, 11), (3, 2), (5, 3), groups=4),
    "c4_input_1_strided": Conv(2, 16, 16, (7, 1), (2, 2), (1, 2), 1, groups=4),
    "c8_output_1": Conv(2, 16, 16, (5, 4), (5, 4), groups=2),
    "c8_images_together": Conv(7, 16, 16, (3, 2), (3, 3), padding=1, groups=2),
    "c8_rows_of_70": Conv(1, 16, 16, (2, 70), (3, 3), padding=1, groups=2),
    "1d_c4_k31": Conv(2, 16, 16, (70,), (31,), padding=15, groups=4),
    "1d_c8_causal": Conv(1, 16, 16, (40,), (3,), padding=((4, 0),), dilation=2, groups=2),
    "1d_c16_strided": Conv(3, 32, 16, (33,), (5,), 3, 2, groups=2),
    "3d_c4": Conv(2, 16, 16, (4, 5, 6), (3, 3, 3), padding=1, groups=4),
    "3d_c8_strided": Conv(1, 16, 32, (5, 6, 7), (3, 2, 3), (2, 1, 2), 1, (1, 2, 1), groups=2),
}


def grouped_cases(operation: str) -> list[Case]:
    """As requests of one operation of `FROM_CONV`."""
    return [FROM_CONV[operation](name, conv) for name, conv in GROUPED.items()]


NOT_FINITE = ("c2", "c8", "c8_to_4_three_merges", "c12_three_merges", "c16", "c8_strided", "3d_c4")
NOT_FINITE += ("c3_pairs", "c6_seven", "c20_to_28")
"""Where NaN and infinities are tried: merged groups, one group, two groups of taps, all ranks."""
