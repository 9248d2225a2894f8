"""Layers whose input has few channels, by the corners of the kernels made for them."""

from __future__ import annotations

from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd, grouped_conv_bwd_weight
from tests.support.numerics.geometries import Conv

__all__ = ["FIRST_LAYERS", "first_cases"]

FIRST_LAYERS: dict[str, Conv] = {
    "resnet": Conv(1, 3, 64, (23, 22), (7, 7), 2, 3),
    "vgg": Conv(2, 3, 40, (9, 37), (3, 3), 1, 1),
    "mobilenet": Conv(2, 3, 32, (15, 19), (3, 3), 2, 1),
    "odd_rows": Conv(1, 3, 24, (9, 13), (3, 3), 2, 0),
    "unet_5x5": Conv(1, 4, 40, (9, 70), (5, 5), 1, 2),
    "yolo_6x6": Conv(2, 3, 48, (14, 131), (6, 6), 2, 2),
    "alexnet": Conv(1, 3, 64, (27, 139), (11, 11), 4, 2),
    "every_third": Conv(2, 4, 20, (19, 24), (7, 8), 3, (2, 1)),
    "wide_kernel": Conv(1, 3, 32, (9, 70), (7, 7), 1, 3),
    "patches": Conv(2, 3, 20, (8, 12), (4, 4), 4),
    "patches_of_16": Conv(2, 3, 24, (35, 48), (16, 16), 16),
    "patches_of_8_in_3d": Conv(1, 4, 17, (4, 16, 24), (2, 8, 8), (2, 8, 8)),
    "patches_that_overlap_along_h": Conv(1, 4, 16, (5, 256), (3, 8), (2, 8), (1, 0)),
    "two_rows_in_three": Conv(1, 2, 9, (10, 11), (2, 5), (1, 2), (0, 2)),
    "six_rows_in_seven": Conv(1, 4, 16, (17, 12), (6, 3), (3, 1), (4, 2)),
    "stride_beyond_kernel": Conv(1, 3, 8, (14, 15), (2, 2), (4, 3)),
    "rows_past_the_last_window": Conv(1, 4, 16, (13, 12), (3, 2), (5, 3)),
    "asymmetric_padding": Conv(2, 3, 16, (8, 7), (3, 4), 1, ((0, 2), (3, 1))),
    "padding_beyond_the_kernel": Conv(1, 3, 16, (6, 5), (3, 3), 1, (4, 5)),
    "rows_in_whole_chunks": Conv(2, 3, 40, (11, 88), (3, 3), 1, 1),
    "short_rows_in_whole_chunks": Conv(1, 3, 88, (14, 16), (3, 3), 2, 1),
    "wide": Conv(1, 3, 16, (5, 430), (3, 5), (1, 2), (1, 2)),
    "channels_1": Conv(1, 1, 128, (12, 20), (3, 3), 1, 1),
    "many_channels_out": Conv(1, 3, 200, (7, 9), (3, 3), 1, 1),
    "1d": Conv(2, 1, 48, (133,), (10,), 5),
    "1d_stereo": Conv(1, 2, 32, (90,), (31,), 2, 15),
    "patches_1d": Conv(2, 1, 72, (130,), (10,), 5),
    "patches_1d_stereo": Conv(1, 2, 48, (96,), (8,), 4, ((4, 0),)),
    "3d": Conv(1, 3, 16, (5, 12, 11), (3, 7, 7), (1, 2, 2), (1, 3, 3)),
    "3d_strided": Conv(1, 1, 24, (9, 8, 10), (4, 3, 3), (3, 1, 2), (2, 1, 1)),
}


def first_cases() -> list[Case]:
    """Forward, backward in the input, backward in the weight."""
    return [
        make(name, conv)
        for name, conv in FIRST_LAYERS.items()
        for make in (conv_fwd, conv_bwd_data, grouped_conv_bwd_weight)
    ]
