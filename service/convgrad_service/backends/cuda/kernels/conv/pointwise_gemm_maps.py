"""The tensor maps of pointwise_gemm."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    ITEM_BYTES,
    ROW_BYTES,
    SLAB_ROWS,
    Config,
    Matrix,
    Product,
)
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["maps_of"]

LINE_BYTES, WIDEST = 128, 256


def maps_of(
    work: ConvWork, product: Product, config: Config, a: Operand, b: Operand
) -> dict[str, tuple[Operand, TiledMap]]:
    """Return the kernel's tensor maps, of which those that it does not use may be any."""
    if product.unaligned:
        return {}
    a_map = a, _map(work.dtype, product, config, product.a, config.m)
    b_map = b, _map(work.dtype, product, config, product.b, config.n)
    # Only TMA stores need a tensor map of the result, which not every result can have.
    by_tma = not (config.reduces or product.in_tf32) and work.result.dtype is work.dtype
    by_tma &= not (product.shifted and product.images)
    d_map = (work.result, _result_map(work.dtype, product, config)) if by_tma else a_map
    return {"a_map": a_map, "b_map": b_map, "d_map": d_map}


def _map(dtype: DType, product: Product, config: Config, matrix: Matrix, extent: int) -> TiledMap:
    """Return the tensor map of an operand, whose boxes `GemmOperand` loads; it rounds to TF32."""
    row_bytes = config.row_bytes(matrix, extent)
    wide, pitch = row_bytes // matrix.item_bytes, matrix.pitch * matrix.item_bytes
    image, summed = matrix.image * matrix.item_bytes, product.summed_images
    # Gradients, channels last, if L2 fetches lines instead of pairs of lines: 0.97 of the time on
    # an H200 (125 configurations, at most 1.03), but 1.02 with the widest tiles (27).
    gradient = (product.a.mn or product.b.mn) and not product.images
    sizes: tuple[int, ...] = (product.depth, matrix.rows)
    strides: tuple[int, ...] = (pitch,)
    box: tuple[int, ...] = (wide, extent)
    if product.shifted and matrix.image:
        # Boxes of one of each `together` channels.
        pixels, channels = (product.depth, matrix.rows)[:: 1 if summed else -1]
        side, images = product.together, summed or product.images
        sizes = (side - 1) * matrix.pitch + pixels // images, channels // side, images
        strides = side * pitch, image
        box = wide, (extent if summed else config.depth) // side, 1
    elif not matrix.mn and matrix.image:
        sizes, strides = (product.depth // summed, matrix.rows, summed), (pitch, image)
        box = wide, extent, 1
    elif matrix.image:
        sizes = matrix.rows // product.images, product.depth, product.images
        strides, box = (pitch, image), (wide, config.depth, 1)
    elif matrix.mn and config.is_whole(matrix, extent):
        sizes, strides = (wide, product.depth, matrix.rows // wide), (pitch, row_bytes)
        box = wide, config.depth, extent // wide
    elif matrix.mn:
        sizes, strides = (matrix.rows, product.depth, 1), (pitch, pitch)
        box = wide, config.depth, 1
    return TiledMap(
        dtype,
        sizes,
        strides,
        swizzle=row_bytes,
        box=box,
        l2_bytes=LINE_BYTES if gradient and config.n < WIDEST else 2 * LINE_BYTES,
        round_to_tf32=dtype is DType.FLOAT32,
    )


def _result_map(dtype: DType, product: Product, config: Config) -> TiledMap:
    """Return the tensor map of the result.

    Its box is 16 rows of a block of columns; either transposed or of planes, 64 rows of all columns
    of a tile.
    """
    across, columns = (product.rows, product.columns), config.stored_columns(product)
    stride, swizzle = product.column_stride, ROW_BYTES[-1]
    box: tuple[int, ...] = (ROW_BYTES[-1] // ITEM_BYTES, columns)
    if product.transposed == (product.images > 0):
        across, stride, swizzle = across[::-1], product.row_stride, config.d_bytes
        box = config.d_bytes // ITEM_BYTES or columns, SLAB_ROWS
    sizes: tuple[int, ...] = across
    strides: tuple[int, ...] = (stride * ITEM_BYTES,)
    if product.images:
        sizes = across[0] // product.images, across[1], product.images
        strides, box = (*strides, product.image_stride * ITEM_BYTES), (*box, 1)
    return TiledMap(dtype, sizes, strides, swizzle=swizzle, box=box)
