"""Dense layers with few channels, by the corners of the kernels that load a tile's halo once."""

from __future__ import annotations

from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd
from tests.support.numerics.geometries import Conv

__all__ = ["HALO_LAYERS", "halo_cases"]

HALO_LAYERS: dict[str, Conv] = {
    "resnet": Conv(2, 64, 64, (14, 14), (3, 3), 1, 1),
    "two_blocks_of_channels": Conv(1, 64, 128, (11, 14), (3, 3), 1, 1),
    "more_channels_than_a_tile": Conv(1, 32, 264, (5, 7), (3, 3), 1, 1),
    "part_of_a_chunk_of_channels": Conv(1, 40, 72, (9, 13), (3, 3), 1, 1),
    "odd_channels": Conv(1, 35, 67, (6, 7), (3, 3), 1, 1),
    "pointwise": Conv(1, 64, 32, (9, 9), (1, 1)),
    "even_kernel": Conv(2, 32, 48, (9, 7), (2, 4), 1, ((0, 1), (2, 1))),
    "no_padding": Conv(1, 64, 32, (8, 9), (3, 5)),
    "padding_beyond_the_kernel": Conv(1, 32, 32, (4, 5), (2, 2), 1, 3),
    "dilated": Conv(1, 32, 64, (13, 12), (3, 3), 1, 2, 2),
    "rows_of_one_chunk": Conv(17, 16, 16, (16, 8), (3, 3), 1, 1),
    "rows_of_one_pixel": Conv(2, 32, 40, (31, 1), (9, 1), 1, ((4, 4), (0, 0))),
    "wide": Conv(1, 32, 32, (3, 300), (3, 3), 1, 1),
    "1d": Conv(2, 32, 64, (333,), (3,), 1, 1),
    "1d_dilated": Conv(1, 64, 40, (70,), (5,), 1, ((8, 0),), 4),
    "3d": Conv(1, 64, 64, (3, 6, 7), (3, 3, 3), 1, 1),
    "3d_two_depths_at_once": Conv(1, 32, 32, (5, 6, 7), (3, 3, 3), 1, 1),
    "3d_few_channels_in_odd_depths": Conv(2, 24, 16, (3, 5, 6), (2, 3, 1), 1, (1, 0, 0)),
    "3d_dilated_depth": Conv(1, 32, 32, (7, 5, 5), (3, 1, 2), 1, (2, 0, 1), (2, 1, 1)),
}


def halo_cases() -> list[Case]:
    """Forward, and backward in the input."""
    return [
        make(name, conv) for name, conv in HALO_LAYERS.items() for make in (conv_fwd, conv_bwd_data)
    ]
