"""Weight gradients of dense layers, for tests of several kernels."""

from __future__ import annotations

from tests.support.numerics.cases import EPILOGUES, FROM_CONV
from tests.support.numerics.geometries import Conv

__all__ = ["CASES", "EPILOGUE", "NONFINITE"]

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "plain": Conv(2, 64, 64, (9, 11), (3, 3), padding=1),
    "many_tiles": Conv(1, 128, 320, (6, 7), (3, 3), padding=1),
    "tiles_and_steps": Conv(2, 64, 320, (12, 13), (3, 3), padding=1),
    "channels_67_to_131": Conv(1, 67, 131, (7, 6), (3, 3), padding=1),
    "channels_24_to_40": Conv(2, 24, 40, (8, 5), (3, 3), padding=1),
    # Not a multiple of 8: beyond the last channel of a tap is the next tap.
    "channels_36_to_20": Conv(2, 36, 20, (5, 6), (3, 3), padding=1),
    "strided": Conv(2, 40, 72, (9, 10), (3, 3), 2, 1),
    "strided_3_by_2": Conv(1, 32, 64, (11, 10), (4, 5), (3, 2), 2),
    "stride_beyond_kernel": Conv(1, 64, 32, (9, 8), (2, 2), 3),
    "kernel_is_stride": Conv(2, 32, 64, (8, 8), (2, 2), 2),
    "dilated": Conv(1, 32, 64, (15, 13), (3, 3), padding=4, dilation=4),
    "dilated_3_by_2": Conv(1, 32, 32, (12, 11), (2, 3), padding=((0, 3), (2, 1)), dilation=(3, 2)),
    "kernel_5": Conv(1, 32, 32, (8, 9), (5, 5), padding=2),
    "kernel_7_by_1": Conv(1, 32, 64, (9, 5), (7, 1), padding=((3, 3), (0, 0))),
    "padding_beyond": Conv(1, 32, 32, (5, 4), (3, 3), padding=((4, 0), (1, 5))),
    "rows_left_over": Conv(1, 32, 32, (12, 11), (3, 2), (5, 3)),
    "pointwise": Conv(3, 64, 128, (7, 7), (1, 1)),
    "output_1": Conv(3, 32, 32, (5, 4), (5, 4)),
    "1d": Conv(2, 64, 64, (150,), (3,), padding=4, dilation=4),
    "1d_strided": Conv(1, 32, 64, (99,), (16,), 8, 4),
    "3d": Conv(1, 32, 32, (4, 5, 6), (3, 3, 3), padding=1),
    "3d_strided": Conv(1, 64, 64, (5, 6, 7), (3, 2, 3), (2, 1, 2), 1, (1, 2, 1)),
}
CASES = {name: FROM_CONV[OPERATION](name, conv) for name, conv in GEOMETRIES.items()}
NONFINITE = ("plain", "strided", "dilated", "padding_beyond", "channels_67_to_131", "3d")
EPILOGUE = [case for case in EPILOGUES if case.operation == OPERATION and "groups" not in case.name]
