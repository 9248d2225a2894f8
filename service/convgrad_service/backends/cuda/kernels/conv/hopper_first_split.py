"""float32 wgrad of a first layer on Hopper, by bfloat16 wgmma on split operands
(hopper_first_split.cu)."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.first_sum import first_sum_instances
from convgrad_service.backends.cuda.kernels.conv.hopper_first_taps import (
    FORMS,
    Kind,
    taps_launches,
    why_not_taps,
)
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HopperFirstSplit"]

# bfloat16 parts of a float32, and channels of a block. With three parts, accumulators for 64
# channels would not fit into the registers.
KINDS = [
    Kind(4, channels, 256, made=parts, made_stages=2)
    for parts, channels in ((2, 64), (2, 32), (3, 32))
]


class HopperFirstSplit:
    """float32 bwd_weight on sm_90a of the layers that `HopperFirstTaps` takes in 16-bit types.

    Computes three bfloat16 products (``precision: high``), which are more accurate than one in
    TF32, or six.
    """

    name = "hopper_first_split"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Splitting along N or H does not change the answer."""
        if work.dtype is not DType.FLOAT32:
            return f"{work.dtype} need not be split"
        return why_not_taps(work, device, _kind(work))

    def launches(self, work: ConvWork, device: CudaDevice, splits: int | None = None) -> Fragment:
        """See `Family.launches`. ``splits`` overrides the chosen number of splits."""
        kind = _kind(work)
        return taps_launches(
            self.name,
            work,
            device,
            kind,
            lambda products, odd: _instance(kind, products, odd),
            splits,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            *(_instance(kind, products, odd) for kind in KINDS for products, odd in FORMS),
            *first_sum_instances(),
        ]


def _kind(work: ConvWork) -> Kind:
    """Return the kind with the widest block of channels whose last 32 are not padding."""
    parts = 2 if work.precision == "high" else 3
    widest = 64 if ceil_div(work.out_channels, 32) % 2 == 0 else 32
    return next(one for one in KINDS if one.made == parts and one.channels <= widest)


def _instance(kind: Kind, products: int, odd: bool) -> Instance:
    defines = {
        "ELEMENT": "float",
        "PARTS": kind.made,
        "CHANNELS": kind.channels,
        "PRODUCTS": products,
        "ODD": int(odd),
    }
    return Instance.of("conv/hopper_first_split.cu", defines, HOPPER)
