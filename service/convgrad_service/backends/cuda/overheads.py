"""What is added to the kernel families' predicted times before they are compared."""

from __future__ import annotations

from convgrad_service.plans.cuda.families import Overhead

__all__ = ["COPY_S", "OVERHEADS"]

OVERHEADS = {
    "grouped_gather": Overhead(0.0),
    "first_weight": Overhead(0.0),
    "hopper_first_taps": Overhead(0.0),
    "col2im": Overhead(4e-6),
    "patch_products": Overhead(5e-6),
    "zero_insertion": Overhead(0.0),
    "grouped_weight": Overhead(0.0),
    "hopper_grouped": Overhead(0.0),
    "hopper_grouped_weight": Overhead(5.7e-6, 0.97),
    "implicit_gemm": Overhead(0.0, 1.0, 4e-6),
    "pointwise_gemm": Overhead(0.0),
    "hopper_gather": Overhead(0.0),
    "hopper_gather_through_channels_last": Overhead(0.0),
    "hopper_halo": Overhead(5.0e-6, 1.2),
    "hopper_halo_through_channels_last": Overhead(5.0e-6, 1.2),
    "hopper_weight": Overhead(0.0),
    "hopper_weight_through_channels_last": Overhead(0.0),
    "hopper_weight_single": Overhead(0.0),
    "dense_gather": Overhead(4.7e-6, 1.09, 4.9e-6),
    "dense_weight": Overhead(8.0e-6, 0.91, 3e-6),
    "dense_weight_through_channels_last": Overhead(8.0e-6, 0.91, 3e-6),
    "split_gather": Overhead(0.0),
    "split_gather_through_channels_last": Overhead(0.0),
    "split_weight": Overhead(0.0),
    "split_weight_through_channels_last": Overhead(7e-6),
    "padded_result": Overhead(0.0, 1.0, 2e-6),
    "batch_last_weight": Overhead(0.0),
    "batch_last_weight_through_channels_last": Overhead(4e-6),
}
"""By the name of a family.

Fitted on an H200 to 250 random layers, like implicit_gemm's model. On the held-out half, the models
with these corrections err by 12 to 20 %. So do those of families for few channels, fitted to half
of 84 other layers (`first_forward` and `hopper_first_taps` by 12 and 13 %, `few_gather` and
`hopper_first_data` by 18 and 20 %).
"""
COPY_S = 3.2e-6
"""Seconds of each copy between layouts, besides its bytes; in 20 depthwise layers on an H200."""
