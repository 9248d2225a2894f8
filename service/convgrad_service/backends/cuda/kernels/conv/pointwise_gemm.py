"""1x1 convolutions of stride 1, channels last, as plain matrix products on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_args import result_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    Config,
    Matrix,
    Product,
    is_whole,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.tensor_maps import MapField, TileMap, pack_maps
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand, Size3

__all__ = ["PointwiseGemm", "product_of"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
CHUNK_BYTES = 16
COUNTERS = ZEROS_BYTES // 4
SLAB_ROWS = 16


class PointwiseGemmArgs(ctypes.Structure):
    """See ``pointwise_gemm.cuh``."""

    _fields_ = (
        *((name, MapField) for name in ("a_map", "b_map", "d_map")),
        *((name, ctypes.c_uint64) for name in ("result", "accumulate", "bias")),
        *((name, ctypes.c_int64) for name in ("row_stride", "column_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("rows", "columns", "plain", "result_in_vectors", "row_tiles", "steps")
        ),
        *((name, ctypes.c_uint64) for name in ("partials", "counters", "b")),
        ("b_pitch", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("alpha", "beta")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "wide_result",
                "activation",
                "cluster",
                "parts",
                "steps_each",
                "owned",
                "depth",
                "a_whole",
                "b_whole",
            )
        ),
    )


class PointwiseGemm:
    """fwd, bwd_data and bwd_weight of one tap and stride 1 in 16 bits, channels side by side."""

    name = "pointwise_gemm"

    def __init__(self, config: Config | None = None) -> None:
        """``config`` where another than the chosen one is tried."""
        self._config = config

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no copy engine and products of warpgroups"
        if work.dtype not in DTYPES:
            return f"{work.dtype.value}: products are of 16 bits"
        if work.groups != 1:
            return f"{work.groups} groups"
        if work.taps > 1 or max(work.stride) > 1 or any(work.pad) or work.input != work.output:
            return "taps, strides or padding"
        if work.accumulate is not None and work.accumulate.strides != result_of(work).strides:
            return "accumulate does not lie as the result does"
        if work.split_k is not None and work.split_k > 1:
            return "a number of splits was asked for"
        if product_of(work) is None:
            return "rows that do not lie evenly, in whole chunks of 16 bytes"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        config = self._config
        assert config is not None
        product = product_of(work, config.swap)
        assert product is not None
        config = replace(config, stages=config.stages or config.most_stages(product, device))
        result = result_of(work)
        a, b = operands_of(work, config.swap)
        args = PointwiseGemmArgs()
        args.rows, args.columns = product.rows, product.columns
        args.row_stride, args.column_stride = product.row_stride, product.column_stride
        args.alpha, args.beta = work.alpha, work.beta
        args.plain, args.wide_result = work.epilogue_free, work.result_dtype is DType.FLOAT32
        args.result_in_vectors = (
            product.column_stride == 1
            and not product.row_stride % 8
            and not product.columns % 8
        )
        args.activation = ACTIVATIONS[work.activation]
        args.cluster, args.parts, args.owned = max(config.cluster, 1), config.parts, config.owned
        args.steps, args.steps_each = config.steps(product), config.steps_each(product)
        args.depth, args.b_pitch = product.depth, product.b.pitch
        size = product.itemsize
        args.a_whole = is_whole(product.a, config.a_extent(product), config.a_bytes // size)
        args.b_whole = is_whole(product.b, config.n, config.b_bytes // size)
        args.row_tiles = rows = config.row_tiles(product)
        columns = config.column_tiles(product)
        workspace: tuple[Workspace, ...] = ()
        partials = f"{work.prefix}pointwise_partials"
        if config.cluster:
            grid = config.splits, columns, rows
            if config.parts > 1:
                size = rows * columns * config.parts * config.m * config.n * 4
                workspace = (Workspace(partials, size),)
        else:
            grid = config.grid(product, device)
        split = config.parts > 1
        launch = Launch(
            _instance(work.dtype, config, product),
            grid,
            (config.threads, 1, 1),
            pack_maps(
                args,
                {
                    "a_map": (a, _map(work.dtype, product.a, product, config, a=True)),
                    "b_map": (b, _map(work.dtype, product.b, product, config, a=False)),
                    "d_map": (
                        (a, _map(work.dtype, product.a, product, config, a=True))
                        if config.cluster
                        else (result, _result_map(work.dtype, product, config))
                    ),
                },
                b=b,
                result=result,
                accumulate=work.accumulate,
                bias=work.bias,
                partials=partials if split else None,
                counters=ZEROS if split else None,
            ),
            config.shared_bytes(product),
            overlaps=work.follows,
            cluster=max(config.cluster, config.share_a, config.share_b),
        )
        return Fragment(
            f"{self.name}_{work.direction}_{config}",
            (launch,),
            workspace,
            order=f"{config.cluster}x{config.parts}" if config.splits > 1 else "",
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return []


def _instance(dtype: DType, config: Config, product: Product) -> Instance:
    defines = config.defines(dtype, product)
    return Instance(
        "conv/pointwise_gemm.cu",
        "pointwise_gemm",
        tuple((name, str(value)) for name, value in defines.items()),
        HOPPER,
    )


def operands_of(work: ConvWork, swap: bool) -> tuple[Operand, Operand]:
    """a and b."""
    if work.direction == "fwd":
        return work.x, work.w
    if work.direction == "bwd_data":
        return work.y, work.w
    return (work.x, work.y) if swap else (work.y, work.x)


def product_of(work: ConvWork, swap: bool = False) -> Product | None:
    """The work as a product, where it is one of matrices that lie in whole chunks. With ``swap`` the
    rows of bwd_weight are the input's channels."""
    pixels = work.batch * prod(work.output)
    _, k, c, *_ = work.w.strides
    size = work.dtype.itemsize
    chunk = CHUNK_BYTES // size
    x, y = _pitch(work.x, work.batch, work.input), _pitch(work.y, work.batch, work.output)
    if x is None or y is None or (c != 1 and work.in_channels > 1):
        return None
    inputs, outputs = work.in_channels, work.out_channels
    if work.direction == "bwd_weight":
        read, depth = (x, y), pixels
        row = Matrix(outputs, y, True)
        column = Matrix(inputs, x, True)
        strides = k, 1
        if swap:
            row, column, strides = column, row, (1, k)
    elif work.direction == "bwd_data":
        read, depth = (y, k), outputs
        row, column, strides = Matrix(pixels, y, False), Matrix(inputs, k, True), (x, 1)
    else:
        read, depth = (x, k), inputs
        row, column, strides = Matrix(pixels, x, False), Matrix(outputs, k, False), (y, 1)
    if any(pitch % chunk for pitch in read):
        return None
    stores = (
        work.epilogue_free
        and work.result_dtype is work.dtype
        and strides[1] == 1
        and strides[0] % chunk == 0
    )
    return Product(row, column, depth, size, *strides, stores)


def _pitch(operand: Operand, batch: int, size: Size3) -> int | None:
    """From one pixel to the next, where that is the same for all, channels side by side."""
    strides = operand.strides
    if strides[2] != 1:
        return None
    pitch = None
    count = 1
    for axis, extent in ((5, size[2]), (4, size[1]), (3, size[0]), (0, batch)):
        if extent == 1:
            continue
        if pitch is None:
            pitch = strides[axis] // count
        if strides[axis] != pitch * count:
            return None
        count *= extent
    return pitch if pitch is not None else strides[5] or strides[0]


def _map(dtype: DType, matrix: Matrix, product: Product, config: Config, a: bool) -> TileMap:
    """Of an operand: `GemmSide` copies by it."""
    size, depth = product.itemsize, config.depth
    row_bytes = config.a_bytes if a else config.b_bytes
    extent = config.a_extent(product) if a else config.n
    share = config.share_a if a else config.share_b
    wide, pitch = row_bytes // size, matrix.pitch * size
    if not matrix.mn:
        box = wide, extent // share
        return TileMap(dtype, (product.depth, matrix.rows), (pitch,), swizzle=row_bytes, box=box)
    whole = is_whole(matrix, extent, wide)
    return TileMap(
        dtype,
        (wide, product.depth, matrix.rows // wide) if whole else (matrix.rows, product.depth, 1),
        (pitch, row_bytes if whole else pitch),
        swizzle=row_bytes,
        box=(wide, depth, extent // wide // share if whole else 1),
    )


def _result_map(dtype: DType, product: Product, config: Config) -> TileMap:
    """Of the result: 16 rows of a block of columns."""
    return TileMap(
        dtype,
        (product.columns, product.rows),
        (product.row_stride * product.itemsize,),
        swizzle=config.d_bytes,
        box=(config.d_bytes // product.itemsize or config.n, SLAB_ROWS),
    )
