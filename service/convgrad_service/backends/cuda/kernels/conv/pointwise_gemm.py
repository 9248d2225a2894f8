"""1x1 convolutions of stride 1 as GEMMs on Hopper (pointwise_gemm.cu)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_configs import every_config, sharing
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_maps import maps_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_model import chosen
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_products import (
    CHUNK,
    SIDE,
    products_of,
    turned_weight,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_rates import WGRAD_TF32
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    ITEM_BYTES,
    UNALIGNED,
    Config,
    Matrix,
    Product,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    IN_16_BITS,
    Requirements,
    is_pointwise,
)
from convgrad_service.backends.cuda.kernels.core.memory_time import with_memory_s
from convgrad_service.backends.cuda.kernels.core.tensor_maps import pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import overlapping
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["PointwiseGemm"]

LINE_BYTES = 128
COUNTERS = ZEROS_BYTES // 4
SWAPPED = "_swapped"
MOST_ROWS = 2**31 - 2**16
# Of a launch before it that transposes a weight, on an H200: the median of 71 configurations of 22
# layers.
TURNED_S = 3.0e-6


PointwiseGemmArgs = structure("conv/pointwise_gemm.cuh", "PointwiseGemmArgs")


NEEDS = Requirements(DTYPES, tf32=True, hopper=True)


class PointwiseGemm:
    """fwd, bwd_data and bwd_weight of 1x1 kernels and stride 1, in 16 bits or in TF32.

    Channels last; in 16 bits also channels first, or in rows that are no whole chunks.
    """

    name = "pointwise_gemm"

    def __init__(
        self,
        config: Config | None = None,
        *,
        swapped: bool = False,
        most_s: float = math.inf,
        planes: bool = False,
        unaligned: bool = False,
        dtypes: Sequence[DType] = DTYPES,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        config
            Overrides the chosen configuration.
        swapped
            Whether ``config`` is for the product with A and B exchanged, if there is one.
        most_s
            The longest expected time of work that it takes, in seconds. A finite one takes no
            planes that do not start at multiples of 16 bytes.
        planes
            Whether it takes only channels first, in planes that start at multiples of 16 bytes.
        unaligned
            Whether it takes only rows that do not start at multiples of 16 bytes, of which it
            takes none otherwise.
        dtypes
            Dtypes that it takes.
        """
        self._config, self._swapped, self._most_s = config, swapped, most_s
        self._planes, self._unaligned = planes, unaligned
        self._needs = replace(NEEDS, dtypes=tuple(dtypes))

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := self._needs.why_not(work, device)) is not None:
            return reason
        if not is_pointwise(work):
            return "taps, strides or padding"
        if work.split_k is not None and work.split_k > 1:
            return "split_k is set by the caller"
        if max(work.pixels, work.in_channels, work.out_channels) > MOST_ROWS:
            return f"more than {MOST_ROWS} pixels or channels"
        if work.follows and work.w.strides[1] * work.dtype.itemsize % LINE_BYTES:
            # hopper_gather copies such weights to whole cache lines while the preceding launch
            # runs, which took 84 instead of 102 us with 728 channels. Not measured for this family.
            return "weight rows that are not whole cache lines, in a work that follows a launch"
        products = self._products(work)
        if not products:
            unfit = "of whole" if self._unaligned else "not of whole"
            return f"rows without a single stride, or {unfit} 16-byte chunks"
        first = products[0]
        if self._planes and not (first.images or first.summed_images):
            return "channels last"
        if first.shifted and (self._planes or self._most_s < math.inf):
            return "planes that do not start at multiples of 16 bytes"
        if self._config is not None:
            return None
        found = chosen(products, device, COUNTERS)
        if found is None:
            return "no tile fits"
        if found[0] > self._most_s:
            return f"expected to take {found[0] * 1e6:.1f} us"
        return None

    def _products(self, work: ConvWork) -> tuple[Product, ...]:
        """Return the GEMMs of the work that it takes."""
        return products_of(work, unaligned=self._unaligned)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        products = self._products(work)
        if self._config is not None:
            product, config = products[self._swapped and len(products) > 1], self._config
            expected_s = None
        else:
            found = chosen(products, device, COUNTERS)
            if found is None:
                raise ValueError("work that why_not refuses")
            expected_s, product, config = found
            if work.dtype is DType.FLOAT32 and work.direction == "bwd_weight":
                expected_s = with_memory_s(work, expected_s, WGRAD_TF32.start_split * 1e-6)
        rows, columns = config.tiles(product)
        partials = f"{work.prefix}pointwise_partials" if config.parts > 1 else None
        workspace: tuple[Workspace, ...] = ()
        if partials is not None:
            size = rows * columns * config.parts * config.m * config.n * 4
            workspace = (Workspace(partials, size),)
        result = work.result
        a, b = _operands(work)
        turned = turned_weight(work, device)
        copies = overlapping(turned.steps, device, first=work.follows) if turned else ()
        if turned is not None:
            b, workspace = turned.operand, (*workspace, *turned.workspace)
            expected_s = None if expected_s is None else expected_s + TURNED_S * len(copies)
        if product.swapped:
            a, b = b, a
        stages = config.stages(product, device)
        launch = Launch(
            _instance(work.dtype, config, product),
            config.grid(product, device),
            (config.threads(product), 1, 1),
            pack_maps(
                _arguments(work, product, config, stages),
                maps_of(work, product, config, a, b),
                a=a if product.unaligned else None,
                b=b,
                result=result,
                accumulate=work.accumulate,
                bias=work.bias,
                partials=partials,
                counters=ZEROS if partials else None,
            ),
            config.shared_bytes(product, stages),
            overlaps=bool(copies) or work.follows,
            cluster=max(config.cluster, config.multicast),
        )
        return Fragment(
            f"{self.name}_{work.direction}_{config}"
            + SWAPPED * product.swapped
            + UNALIGNED * product.unaligned,
            (*copies, launch),
            workspace,
            expected_s=expected_s,
            # The depth of a k-tile determines where K is split, so it is part of the order.
            order=f"{config.cluster}x{config.parts}/{config.depth}" if config.splits > 1 else "",
        )

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> PointwiseGemm | None:
        name, unaligned = config.removesuffix(UNALIGNED), config.endswith(UNALIGNED)
        found = Config.named(name.removesuffix(SWAPPED))
        if found is None:
            return None
        return PointwiseGemm(found, swapped=name.endswith(SWAPPED), unaligned=unaligned)

    def instances(self) -> Iterable[Instance]:
        # Whether A and B are MN-major: fwd, bwd_data and bwd_weight; then the former two transposed
        # and of planes, then bwd_weight of planes.
        majors = (False, False), (False, True), (True, True)
        products = [_like(a, b, transposed=False) for a, b in majors]
        products += [_like(b, a, transposed=True) for a, b in majors[:2]]
        products += [replace(_like(True, b, transposed=False), images=1) for _, b in majors[:2]]
        planes = replace(_like(True, True, transposed=True), images=1)
        products += [replace(planes, together=SIDE)]
        weights = replace(_like(False, False, transposed=False), summed_images=1)
        products += [weights, replace(weights, together=SIDE)]
        found = {
            _instance(dtype, one, product): None
            for dtype in IN_16_BITS
            for product in products
            for config in every_config(product.menu)
            for one in (config, *sharing(config, product))
        }
        rows = [_like(a, b, transposed=False) for a, b in majors[:2]]
        rows += [replace(_like(True, True, transposed=False), stores=False)]
        rows += [replace(_like(b, True, transposed=True), images=1) for _, b in majors[:2]]
        rows += [replace(weights, stores=False)]
        for pitch in (CHUNK + 1, CHUNK + 2) if self._unaligned else ():
            for one in rows:
                a, b = (replace(side, pitch=pitch) for side in (one.a, one.b))
                like = replace(one, a=a, b=b, unaligned=True)
                found |= {
                    _instance(dtype, one, like): None
                    for dtype in IN_16_BITS
                    for one in every_config(like.menu)
                }
        tf32 = [_like(a, b, transposed=False, item_bytes=4) for a, b in (majors[0], majors[2])]
        tf32 += [_like(True, False, transposed=True, item_bytes=4)]
        tf32 += [replace(_like(True, False, transposed=False, item_bytes=4), images=1)]
        tf32 += [replace(tf32[0], summed_images=1, stores=False)]
        return [
            *found,
            *(
                _instance(DType.FLOAT32, config, product)
                for product in tf32
                for config in every_config(product.menu)
            ),
        ]


def _like(a_mn: bool, b_mn: bool, *, transposed: bool, item_bytes: int = ITEM_BYTES) -> Product:
    """Return some product whose operands lie so."""
    strides = (1, CHUNK) if transposed else (CHUNK, 1)
    a, b = (Matrix(1, 1, mn, item_bytes=item_bytes) for mn in (a_mn, b_mn))
    stores = item_bytes == ITEM_BYTES or not b_mn
    return Product(a, b, 1, *strides, stores=stores, swapped=transposed)


def _moves(config: Config, product: Product) -> int:
    """Return the dimension whose tiles a block takes in turn: 0 for rows, 1 for columns."""
    return int(product.transposed and not config.reduces)


def _arguments(work: ConvWork, product: Product, config: Config, stages: int) -> Any:
    """Return the kernel parameters without addresses and tensor maps."""
    args = PointwiseGemmArgs()
    args.rows, args.columns, args.depth = product.rows, product.columns, product.depth
    args.row_stride, args.column_stride = product.row_stride, product.column_stride
    args.alpha, args.beta = work.alpha, work.beta
    args.activation = ACTIVATIONS[work.activation]
    args.plain, args.wide_result = work.epilogue_free, work.result_dtype is not work.dtype
    args.result_in_vectors = (
        product.column_stride == 1
        and not product.unaligned
        and not product.row_stride % CHUNK
        and not product.columns % CHUNK
    )
    args.cluster = max(config.cluster, config.multicast)
    args.parts, args.owned = config.parts, config.owned
    args.steps, args.steps_each = config.steps(product), config.steps_each(product)
    args.slices = config.slices if config.in_grid else 1
    args.stages, args.row_tiles = stages, config.tiles(product)[_moves(config, product)]
    args.b_pitch = product.b.pitch
    args.a_whole = config.is_whole(product.a, config.m)
    args.b_whole = config.is_whole(product.b, config.n)
    args.image_tiles = args.row_tiles // max(product.images, 1)
    if product.summed_images:
        args.image_tiles = config.image_steps(product)
    if product.in_tf32 and product.images:
        args.pixels, args.image_stride = product.rows // product.images, product.image_stride
    if product.unaligned:
        pixels = product.depth if product.summed_images else product.columns
        args.pixels = pixels // max(product.images, product.summed_images, 1)
        args.a_channel, args.b_channel = product.a.pitch, product.b.pitch
        args.a_image, args.b_image = product.a.image, product.b.image
        args.image_stride = product.image_stride
        whole = product.row_stride == product.columns <= config.n and not product.images
        strides = product.row_stride, product.image_stride
        args.stored_pixels = 0 if whole else math.gcd(args.pixels, *strides, CHUNK)
    if product.shifted:
        args.pixels = (product.depth if product.summed_images else product.columns) // work.batch
        args.a_channel, args.b_channel = product.a.pitch, product.b.pitch
        args.together, args.image_stride = product.together, product.image_stride
        strides = product.row_stride, product.image_stride
        args.stored_pixels = math.gcd(args.pixels, *strides, CHUNK)
    return args


def _instance(dtype: DType, config: Config, product: Product) -> Instance:
    return Instance.of("conv/pointwise_gemm.cu", HOPPER, **config.defines(dtype, product))


def _operands(work: ConvWork) -> tuple[Operand, Operand]:
    """Return the operands A and B."""
    if work.direction == "fwd":
        return work.x, work.w
    return work.y, work.w if work.direction == "bwd_data" else work.x
