"""Small 1x1 convolutions as products by FMA in float32, for latency (simt_gemm.cu).

Layers of a few pixels, such as those of squeeze-and-excite blocks, take about as long as a launch.
This kernel has few instructions, no pipeline to fill, and issues all loads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    MAX_GRID_YZ,
    Requirements,
    is_pointwise,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand
from convgrad_service.problems.sizes import Size3

__all__ = ["Config", "Product", "SimtGemm", "candidate_configs", "expected_s", "product_of"]

SIDE = 4
"""Rows, and columns, of a thread's sums; and the terms that it reads at once."""
UNROLLED = 2
THREADS = (128, 256, 512)
# Per thread: its sums, and one more.
SHARED_BYTES = (SIDE * SIDE + 1) * 4
# Threads of an SM, which registers limit.
RESIDENT_THREADS = 512
MOST_PRODUCTS = 2**25
MOST_ELEMENTS = 2**24
# Whether terms are contiguous in A, and in B: of the kernel's instances.
FORMS = (True, True), (True, False), (False, False)

SimtGemmArgs = structure("conv/simt_gemm.cu", "SimtGemmArgs")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A factor or the result: its operand, and the elements from one line to the next, and from one
    image to the next."""

    operand: Operand
    stride: int
    image: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """result[rows][columns] = sum over terms of a * b.

    Attributes
    ----------
    images, summed
        The images that have a product each, and those over which the terms are summed.
    in_a, in_b
        Whether terms are contiguous in a factor.
    """

    rows: int
    columns: int
    terms: int
    a: Matrix
    b: Matrix
    result: Matrix
    images: int
    summed: int
    in_a: bool
    in_b: bool

    @property
    def units(self) -> int:
        """Terms that a thread reads at once, of all images."""
        return self.summed * ceil_div(self.terms, SIDE)

    @property
    def vectors(self) -> bool:
        """Whether lines of both factors are whole vectors of `SIDE` elements."""
        widths = (
            self.terms if self.in_a else self.rows,
            self.terms if self.in_b else self.columns,
        )
        strides = (each for one in (self.a, self.b) for each in (one.stride, one.image))
        return not any(value % SIDE for value in (*widths, *strides))


@dataclass(frozen=True, slots=True)
class Config:
    """The threads of a block, and log2 of those along a tile's columns and rows."""

    threads: int
    across_log: int
    down_log: int

    def __str__(self) -> str:
        return f"{SIDE << self.down_log}x{SIDE << self.across_log}k{self.slices}"

    @property
    def slices(self) -> int:
        """The threads among which a tile's terms are divided."""
        return self.threads >> (self.across_log + self.down_log)

    def grid(self, product: Product) -> tuple[int, int, int]:
        return (
            ceil_div(product.columns, SIDE << self.across_log),
            ceil_div(product.rows, SIDE << self.down_log),
            product.images,
        )


class SimtGemm(Solver[ConvWork, Config]):
    """fwd, bwd_data and bwd_weight of one tap and stride 1, in 16-bit types and float32.

    Channels last or channels first.
    """

    name = "simt_gemm"

    def __init__(
        self,
        most_s: float = inf,
        config: Config | None = None,
        *,
        most_pixels: int = 2**31,
        most_products: int = MOST_PRODUCTS,
        most_channels: int = 2**31,
        dtypes: Sequence[DType] = DTYPES,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        most_s
            Layers that are expected to take longer are left to other families.
        config
            Overrides the chosen configuration.
        most_pixels
            The most pixels of the batch.
        most_products
            The most products of two elements.
        most_channels
            The most channels of the side that has fewer.
        dtypes
            Dtypes that it takes.
        """
        self._most_s, self._config = most_s, config
        self._most_pixels, self._most_products = most_pixels, most_products
        self._most_channels, self._needs = most_channels, Requirements(dtypes=tuple(dtypes))

    def solve(self, work: ConvWork, device: CudaDevice) -> Config | str:
        if (reason := self._needs.why_not(work, device) or why_not_product(work)) is not None:
            return reason
        narrow = min(work.in_channels, work.out_channels)
        if narrow > self._most_channels:
            return f"{narrow} channels on the narrower side are more than {self._most_channels}"
        if work.pixels > self._most_pixels:
            return f"{work.pixels} pixels are more than {self._most_pixels}"
        if (products := _products(work)) > self._most_products:
            return f"{products} products are more than {self._most_products}"
        if self._config is not None:
            return self._config
        product = product_of(work)
        time_s, config = min(
            (
                (expected_s(product, work.dtype, config, device), config)
                for config in candidate_configs(product)
            ),
            key=lambda found: found[0],
        )
        if time_s > self._most_s:
            return f"expected to take {time_s * 1e6:.1f} us"
        return config

    def fragment(self, work: ConvWork, device: CudaDevice, config: Config) -> Fragment:
        product = product_of(work)
        args = SimtGemmArgs()
        args.rows, args.columns, args.terms = product.rows, product.columns, product.terms
        args.a_stride, args.b_stride = product.a.stride, product.b.stride
        args.result_stride = product.result.stride
        args.a_image, args.b_image = product.a.image, product.b.image
        args.result_image = product.result.image
        args.units = product.units
        args.by_image.factor, args.by_image.shift = divider(product.units // product.summed)
        args.across_log, args.down_log = config.across_log, config.down_log
        launch = Launch(
            _instance(work.dtype, product.in_a, product.in_b, vectors=product.vectors),
            config.grid(product),
            (config.threads, 1, 1),
            pack(args, a=product.a.operand, b=product.b.operand, result=product.result.operand),
            config.threads * SHARED_BYTES,
            overlaps=work.follows and device.capability >= OVERLAPPING,
        )
        return Fragment(
            f"{self.name}_{work.direction}_{config}",
            (launch,),
            expected_s=expected_s(product, work.dtype, config, device),
            order=f"k{config.slices}",
        )

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, in_a, in_b, vectors=vectors)
            for dtype in DTYPES
            for in_a, in_b in FORMS
            for vectors in (True, False)
        ]


def _instance(dtype: DType, in_a: bool, in_b: bool, *, vectors: bool) -> Instance:
    return Instance.of(
        "conv/simt_gemm.cu", ELEMENT=dtype, A_TERMS=in_a, B_TERMS=in_b, VECTORS=vectors
    )


def why_not_product(work: ConvWork) -> str | None:
    """Return why a convolution is not a product of small matrices in memory, or None."""
    if not is_pointwise(work):
        return "not 1x1 with stride 1"
    if not work.epilogue_free or work.result_dtype is not work.dtype:
        return "an epilogue, or a result of another type"
    if work.split_k is not None and work.split_k > 1:
        return "split_k is set by the caller"
    if work.in_channels > 1 and work.w.strides[2] != 1:
        return "a weight whose input channels are not contiguous"
    if not _is_last(work):
        if any(_lines(one, 1, work.input)[0][1] != 1 for one in work.sides):
            return "neither channels nor pixels that are contiguous"
        if not all(_follow(one, 1, work.input) for one in work.sides):
            return "pixels that do not follow one another"
    elif not all(_follow(one, work.batch, work.input) for one in work.sides):
        return "pixels that do not follow one another"
    product = product_of(work)
    products = _products(work)
    if products > MOST_PRODUCTS:
        return f"{products} products are more than {MOST_PRODUCTS}"
    if max(ceil_div(product.rows, SIDE), product.images) > MAX_GRID_YZ:
        return f"{product.rows} rows, or {product.images} images"
    lines = max(product.rows, product.columns, product.terms) + SIDE
    matrices = product.a, product.b, product.result
    if max(lines * one.stride + work.batch * one.image for one in matrices) > MOST_ELEMENTS:
        return f"tensors of more than {MOST_ELEMENTS} elements"
    return None


def _products(work: ConvWork) -> int:
    return work.pixels * work.in_channels * work.out_channels


def product_of(work: ConvWork) -> Product:
    """Return the product of matrices that a convolution is unless `why_not_product` refuses it."""
    weight = Matrix(work.w, work.w.strides[1])
    pixels, inputs, outputs = work.pixels, work.in_channels, work.out_channels
    if _is_last(work):
        x, y = (Matrix(one, _lines(one, work.batch, work.input)[0][1]) for one in (work.x, work.y))
        if work.direction == "bwd_weight":
            return Product(outputs, inputs, pixels, y, x, weight, 1, 1, False, False)
        if work.direction == "fwd":
            return Product(pixels, outputs, inputs, x, weight, y, 1, 1, True, True)
        return Product(pixels, inputs, outputs, y, weight, x, 1, 1, True, False)
    images = work.batch
    x, y = (
        Matrix(one, one.strides[2], one.strides[0] if images > 1 else 0) for one in (work.x, work.y)
    )
    pixels //= images
    if work.direction == "bwd_weight":
        return Product(outputs, inputs, pixels, y, x, weight, 1, images, True, True)
    if work.direction == "fwd":
        return Product(outputs, pixels, inputs, weight, x, y, images, 1, True, False)
    return Product(inputs, pixels, outputs, weight, y, x, images, 1, False, False)


def _is_last(work: ConvWork) -> bool:
    """Return whether channels are contiguous on both sides, or single."""
    return all(
        count == 1 or one.strides[2] == 1
        for count, one in zip(work.channels, work.sides, strict=True)
    )


def _lines(operand: Operand, batch: int, size: Size3) -> list[tuple[int, int]]:
    """Return the extents and strides of pixels, innermost first, without those of one pixel."""
    n, _, _, *spatial = operand.strides
    axes = zip((batch, *size), (n, *spatial), strict=True)
    return [axis for axis in axes if axis[0] > 1][::-1] or [(1, 0)]


def _follow(operand: Operand, batch: int, size: Size3) -> bool:
    """Return whether pixels are at multiples of a stride."""
    lines = _lines(operand, batch, size)
    wanted = lines[0][1]
    for extent, stride in lines:
        if stride != wanted:
            return False
        wanted *= extent
    return True


def candidate_configs(product: Product) -> Iterator[Config]:
    """Yield the configurations whose tiles and slices are not mostly empty."""
    most_across = (ceil_div(product.columns, SIDE) - 1).bit_length()
    most_down = (ceil_div(product.rows, SIDE) - 1).bit_length()
    for threads in THREADS:
        for across_log in range(min(most_across, 5) + 1):
            for down_log in range(min(most_down, 4) + 1):
                config = Config(threads, across_log, down_log)
                if config.slices < 1:
                    continue
                if config.slices > 2 * product.units and threads > THREADS[0]:
                    continue
                yield config


def expected_s(product: Product, dtype: DType, config: Config, device: CudaDevice) -> float:
    """Return the expected seconds of a launch in a CUDA graph.

    Fitted on an H200 to 1,000 configurations of 105 layers; fitted to half of the layers, it errs
    by 7 % on the others. Where terms are contiguous in no factor, each is a sector of its own.
    """
    blocks = ceil_div(prod(config.grid(product)), device.multiprocessors)
    waves = ceil_div(blocks * config.threads, RESIDENT_THREADS)
    rounds = ceil_div(product.units, config.slices * UNROLLED)
    warps = config.threads / 128  # of a scheduler
    terms = product.terms * product.summed
    elements = product.rows * product.columns + terms * (product.rows + product.columns)
    elements *= product.images
    total_us = 4.75 + 0.594 * rounds * waves + 0.099 * warps
    total_us += blocks * warps * (0.038 + rounds * (0.103 if product.vectors else 0.203))
    total_us += 0.043 * max(1.0, config.slices / 16) + 0.584e-6 * elements * dtype.itemsize
    if not (product.in_a or product.in_b):
        total_us += 1.7e-3 * terms
    return total_us * 1e-6
