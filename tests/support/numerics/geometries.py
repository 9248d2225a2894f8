"""Named geometries: every hard one by name, one thing at a time, small enough for plain loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.numerics.reference import (
    Padding,
    Sizes,
    conv_output_size,
    per_dimension,
    pool_output_size,
    smallest_input_size,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conv:
    """The geometry of a convolution; C and K are totals over the groups."""

    n: int
    c: int
    k: int
    size: Shape
    kernel: Shape
    stride: Sizes = 1
    padding: Padding = 0
    dilation: Sizes = 1
    groups: int = 1

    @property
    def ndim(self) -> int:
        return len(self.size)

    @property
    def output_size(self) -> Shape:
        return conv_output_size(self.size, self.kernel, self.stride, self.padding, self.dilation)

    @property
    def input_shape(self) -> Shape:
        return (self.n, self.c, *self.size)

    @property
    def weight_shape(self) -> Shape:
        return (self.k, self.c // self.groups, *self.kernel)

    @property
    def output_shape(self) -> Shape:
        return (self.n, self.k, *self.output_size)

    @property
    def params(self) -> dict[str, Any]:
        """The geometry's parameters; those that have their default stay out, as a caller would."""
        given = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        given["groups"] = self.groups
        return {k: v for k, v in given.items() if v != (0 if k == "padding" else 1)}

    @property
    def rows_left_over(self) -> Shape:
        """Rows past the last window: what output_padding calls them."""
        least = smallest_input_size(
            self.output_size, self.kernel, self.stride, self.padding, self.dilation
        )
        return tuple(a - b for a, b in zip(self.size, least, strict=True))


CONVS: dict[str, Conv] = {
    # 2D, one hard thing each
    "plain": Conv(2, 8, 16, (9, 10), (3, 3), padding=1),
    "pointwise": Conv(2, 19, 21, (7, 6), (1, 1)),
    "pointwise_strided": Conv(1, 8, 12, (7, 8), (1, 1), stride=2),
    "batch_1": Conv(1, 16, 8, (8, 17), (3, 3), padding=1),
    "batch_5": Conv(5, 4, 6, (5, 6), (3, 3), padding=1),
    "first_layer_7x7": Conv(1, 3, 16, (23, 22), (7, 7), stride=2, padding=3),
    "first_layer_patchify": Conv(2, 3, 20, (8, 12), (4, 4), stride=4),
    "stride_beyond_kernel": Conv(2, 5, 6, (11, 13), (2, 2), stride=3),
    "stride_beyond_kernel_1x1": Conv(1, 6, 5, (10, 11), (1, 1), stride=4, padding=1),
    "stride_shares_factor_with_dilation": Conv(1, 6, 7, (15, 14), (3, 3), 2, 2, 2),
    "stride_4_dilation_6": Conv(1, 4, 5, (20, 23), (3, 2), 4, 5, 6),
    "stride_3_dilation_2": Conv(2, 5, 4, (14, 13), (3, 3), 3, 2, 2),
    "dilated": Conv(1, 7, 9, (12, 13), (3, 3), padding=3, dilation=3),
    "rows_past_the_last_window": Conv(1, 4, 6, (12, 11), (3, 2), stride=(5, 3)),
    "asymmetric_padding": Conv(2, 6, 5, (8, 7), (3, 4), padding=((0, 2), (3, 1))),
    "padding_beyond_the_kernel": Conv(1, 5, 4, (6, 5), (3, 3), padding=(4, 5)),
    "padding_one_side_beyond": Conv(1, 4, 4, (5, 6), (2, 3), 2, ((6, 0), (0, 7))),
    "input_smaller_than_kernel": Conv(2, 4, 3, (2, 1), (5, 3), padding=(2, 1)),
    "input_extent_1_strided": Conv(2, 8, 12, (6, 1), (2, 2), (1, 2), 1),
    "output_extent_1": Conv(2, 6, 7, (5, 4), (5, 4)),
    "channels_1": Conv(2, 1, 1, (7, 9), (3, 3), padding=1),
    "channels_1_to_3": Conv(1, 1, 3, (6, 8), (3, 3), padding=1),
    "channels_3": Conv(2, 3, 3, (6, 7), (3, 3), padding=1),
    "channels_67": Conv(1, 67, 67, (5, 4), (3, 3), padding=1),
    "channels_131": Conv(1, 131, 67, (4, 5), (1, 3), padding=(0, 1)),
    "channels_33_to_130": Conv(1, 33, 130, (3, 5), (2, 2)),
    "depthwise": Conv(2, 19, 19, (9, 8), (3, 3), padding=1, groups=19),
    "depthwise_strided": Conv(1, 16, 16, (11, 10), (3, 3), 2, 1, groups=16),
    "depthwise_7x7": Conv(1, 5, 5, (10, 9), (7, 7), padding=3, groups=5),
    "depthwise_multiplier_2": Conv(1, 6, 12, (7, 8), (3, 3), padding=1, groups=6),
    "depthwise_multiplier_3_strided": Conv(2, 4, 12, (8, 9), (3, 3), 2, 1, groups=4),
    "groups_2": Conv(1, 10, 6, (7, 6), (3, 3), padding=1, groups=2),
    "groups_3_odd": Conv(2, 9, 15, (5, 6), (3, 2), padding=1, groups=3),
    "groups_4": Conv(1, 32, 16, (6, 5), (3, 3), padding=1, groups=4),
    "groups_32": Conv(1, 128, 64, (5, 4), (3, 3), padding=1, groups=32),
    "each_dimension_its_own": Conv(1, 5, 6, (9, 14), (1, 3), (1, 2), ((0, 0), (2, 1)), (1, 3)),
    "wide_row": Conv(1, 3, 5, (3, 71), (3, 3), padding=1),
    "tall_column": Conv(1, 6, 5, (67, 1), (3, 1), padding=(1, 0)),
    "large_plane": Conv(1, 2, 3, (33, 35), (5, 5), padding=2),
    # 1D
    "1d_plain": Conv(2, 7, 9, (37,), (3,), padding=1),
    "1d_k31": Conv(1, 4, 5, (64,), (31,), padding=15),
    "1d_stride_beyond_kernel": Conv(1, 5, 6, (29,), (2,), stride=5),
    "1d_stride_shares_factor_with_dilation": Conv(2, 3, 4, (31,), (4,), 4, 3, 6),
    "1d_causal": Conv(1, 8, 8, (20,), (3,), padding=((4, 0),), dilation=2),
    "1d_depthwise": Conv(2, 17, 17, (23,), (5,), padding=2, groups=17),
    "1d_groups_4": Conv(1, 12, 20, (16,), (3,), 2, 1, groups=4),
    "1d_pointwise": Conv(3, 67, 5, (11,), (1,)),
    "1d_output_extent_1": Conv(2, 3, 5, (6,), (6,)),
    # 3D
    "3d_plain": Conv(1, 6, 8, (4, 6, 5), (3, 3, 3), padding=1),
    "3d_first_layer": Conv(1, 3, 8, (5, 9, 8), (3, 5, 5), (1, 2, 2), (1, 2, 2)),
    "3d_pointwise": Conv(2, 17, 18, (2, 3, 5), (1, 1, 1)),
    "3d_stride_beyond_kernel": Conv(1, 4, 3, (5, 6, 7), (1, 2, 2), (2, 3, 4)),
    "3d_stride_shares_factor_with_dilation": Conv(1, 3, 4, (7, 8, 9), (2, 3, 2), 2, 2, (2, 2, 4)),
    "3d_asymmetric_padding": Conv(1, 4, 5, (4, 3, 5), (2, 3, 3), 1, ((0, 1), (2, 0), (1, 3))),
    "3d_padding_beyond_the_kernel": Conv(1, 3, 4, (2, 3, 2), (2, 1, 2), 1, (3, 2, 4)),
    "3d_rows_past_the_last_window": Conv(1, 4, 3, (7, 9, 8), (2, 2, 3), (3, 4, 3)),
    "3d_depthwise": Conv(1, 9, 9, (4, 5, 6), (3, 3, 3), padding=1, groups=9),
    "3d_groups_2": Conv(1, 34, 20, (3, 4, 3), (3, 1, 3), padding=(1, 0, 1), groups=2),
    "3d_factored": Conv(2, 5, 6, (5, 4, 4), (3, 1, 1), padding=(1, 0, 0)),
    "3d_output_extent_1": Conv(1, 5, 4, (3, 4, 2), (3, 4, 2)),
}


@dataclass(frozen=True)
class Pool:
    """The geometry of a pooling."""

    n: int
    c: int
    size: Shape
    kernel: Sizes
    stride: Sizes | None = None
    padding: Padding = 0
    dilation: Sizes = 1
    ceil_mode: bool = False

    @property
    def ndim(self) -> int:
        return len(self.size)

    @property
    def output_size(self) -> Shape:
        kernel = per_dimension(self.kernel, self.ndim)
        stride = kernel if self.stride is None else self.stride
        return pool_output_size(
            self.size, kernel, stride, self.padding, self.dilation, self.ceil_mode
        )

    @property
    def input_shape(self) -> Shape:
        return (self.n, self.c, *self.size)

    @property
    def output_shape(self) -> Shape:
        return (self.n, self.c, *self.output_size)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters; those that have their default stay out."""
        given: dict[str, Any] = {"kernel_size": self.kernel}
        if self.stride is not None:
            given["stride"] = self.stride
        if self.padding != 0:
            given["padding"] = self.padding
        if self.dilation != 1:
            given["dilation"] = self.dilation
        if self.ceil_mode:
            given["ceil_mode"] = True
        return given


POOLS: dict[str, Pool] = {
    "plain": Pool(2, 5, (8, 10), 2),
    "overlapping": Pool(2, 7, (13, 12), 3, 2, 1),
    "stride_1": Pool(1, 6, (9, 8), 5, 1, 2),
    "gaps": Pool(1, 3, (11, 10), 2, 3),
    "rows_past_the_last_window": Pool(2, 4, (8, 9), 3, 3),
    "ceil": Pool(2, 3, (8, 9), 3, 2, ceil_mode=True),
    "ceil_padded": Pool(1, 4, (7, 6), 3, 2, 1, ceil_mode=True),
    "ceil_kernel_past_the_input": Pool(2, 3, (2, 5), 3, 2, ceil_mode=True),
    "ceil_drops_a_window": Pool(1, 3, (5, 5), 2, 3, 1, ceil_mode=True),
    "dilated": Pool(2, 3, (12, 11), 3, 1, 0, 2),
    "dilated_strided_padded": Pool(1, 5, (13, 12), (3, 2), (2, 3), 1, (3, 2)),
    "dilated_ceil": Pool(1, 2, (10, 9), 3, 2, 1, 2, ceil_mode=True),
    "asymmetric_padding": Pool(2, 3, (7, 8), (3, 4), 2, ((0, 2), (3, 1))),
    "each_dimension_its_own": Pool(1, 4, (9, 12), (1, 3), (2, 1), (0, 1)),
    "whole_plane": Pool(2, 67, (4, 5), (4, 5)),
    "one_by_one": Pool(1, 3, (4, 5), 1),
    "channels_1": Pool(3, 1, (6, 7), 3, 2, 1),
    "channels_67": Pool(1, 67, (5, 4), 2, 1),
    "wide_row": Pool(1, 2, (3, 70), 3, 2, 1),
    "1d_plain": Pool(2, 5, (11,), 2),
    "1d_overlapping": Pool(1, 8, (37,), 5, 2, 2),
    "1d_dilated_ceil": Pool(2, 3, (20,), 3, 2, 1, 2, ceil_mode=True),
    "3d_plain": Pool(1, 5, (4, 6, 4), 2),
    "3d_overlapping": Pool(2, 3, (5, 7, 6), 3, 2, 1),
    "3d_stride_1": Pool(1, 4, (4, 5, 6), 3, 1, 1),
    "3d_ceil": Pool(1, 3, (5, 6, 7), (2, 3, 2), 2, ceil_mode=True),
    "3d_dilated": Pool(1, 3, (7, 8, 6), (2, 3, 2), 1, 1, (2, 2, 3)),
    "3d_asymmetric_padding": Pool(2, 2, (4, 5, 6), 3, 2, ((2, 0), (0, 1), (1, 2))),
    "3d_flat_window": Pool(1, 7, (3, 8, 7), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
}
