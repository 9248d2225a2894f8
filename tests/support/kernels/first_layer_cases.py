"""Weight gradients of first layers, for tests of several kernels."""

from __future__ import annotations

from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.geometries import Conv

__all__ = ["CASES", "OPERATION"]

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "resnet": Conv(2, 3, 64, (13, 16), (7, 7), 2, 3),
    # Rows of several segments, and a partial block of channels.
    "wide": Conv(1, 3, 24, (9, 320), (7, 7), 2, 3),
    "mobilenet": Conv(3, 3, 32, (10, 24), (3, 3), 2, 1),
    # Kernel rows in two groups, the second of which is smaller.
    "alexnet": Conv(1, 3, 64, (35, 40), (11, 11), 4, 2),
    # Rows of grad_output that share no input.
    "patches": Conv(2, 3, 96, (12, 16), (4, 4), 4),
    "four_channels": Conv(1, 4, 16, (12, 16), (7, 7), 2, 3),
    "one_channel": Conv(2, 1, 16, (9, 32), (5, 5), 2, 2),
    "vgg_of_four": Conv(1, 4, 64, (9, 32), (3, 3), 1, 1),
    "stride_beyond_kernel": Conv(1, 4, 8, (14, 16), (2, 2), (4, 3)),
    "asymmetric_padding": Conv(2, 3, 16, (8, 16), (3, 3), 2, ((0, 3), (4, 1))),
    # Windows an odd number of elements apart.
    "vgg": Conv(2, 3, 24, (9, 40), (3, 3), 1, 1),
    "odd_start": Conv(1, 3, 16, (9, 30), (5, 4), 3, (2, 1)),
    "one_channel_stride_1": Conv(2, 1, 32, (28, 28), (3, 3)),
    # Rows and pixels that are no whole chunks, and are copied.
    "odd_width": Conv(2, 3, 21, (11, 27), (3, 3), 2, 1),
    "six_channels": Conv(1, 6, 40, (9, 21), (3, 3), 1, 1),
    "1d": Conv(2, 1, 24, (300,), (10,), 5),
    # Taps along D in blocks of their own.
    "3d": Conv(2, 3, 24, (5, 9, 20), (3, 3, 3), (1, 2, 2), 1),
    "3d_stride_1": Conv(1, 3, 70, (4, 6, 18), (3, 5, 5), 1, (1, 2, 2)),
}
CASES = {name: FROM_CONV[OPERATION](name, conv) for name, conv in GEOMETRIES.items()}
