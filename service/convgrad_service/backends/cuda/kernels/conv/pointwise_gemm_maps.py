"""The tensor maps of pointwise_gemm."""

from __future__ import annotations

from dataclasses import replace

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
    found = _boxes(dtype, product, config, matrix, extent)
    return replace(found, round_to_tf32=dtype is DType.FLOAT32)


def _boxes(dtype: DType, product: Product, config: Config, matrix: Matrix, extent: int) -> TiledMap:
    row_bytes = config.row_bytes(matrix, extent)
    wide, pitch = row_bytes // matrix.item_bytes, matrix.pitch * matrix.item_bytes
    # Gradients, channels last, if L2 fetches lines instead of pairs of lines: 0.97 of the time on
    # an H200 (125 configurations, at most 1.03), but 1.02 with the widest tiles (27).
    gradient = (product.a.mn or product.b.mn) and not product.images
    fetched = LINE_BYTES if gradient and config.n < WIDEST else 2 * LINE_BYTES
    if product.shifted and matrix.image:
        # Boxes of one of each `together` channels.
        pixels = product.depth if product.summed_images else matrix.rows
        channels = matrix.rows if product.summed_images else product.depth
        at_once = extent if product.summed_images else config.depth
        side, images = product.together, product.summed_images or product.images
        return TiledMap(
            dtype,
            ((side - 1) * matrix.pitch + pixels // images, channels // side, images),
            (side * pitch, matrix.image * ITEM_BYTES),
            swizzle=row_bytes,
            box=(wide, at_once // side, 1),
            l2_bytes=fetched,
        )
    if not matrix.mn and matrix.image:
        return TiledMap(
            dtype,
            (product.depth // product.summed_images, matrix.rows, product.summed_images),
            (pitch, matrix.image * matrix.item_bytes),
            swizzle=row_bytes,
            box=(wide, extent, 1),
            l2_bytes=fetched,
        )
    if not matrix.mn:
        sizes, box = (product.depth, matrix.rows), (wide, extent)
        return TiledMap(
            dtype,
            sizes,
            (pitch,),
            swizzle=row_bytes,
            box=box,
            l2_bytes=fetched,
        )
    whole = config.is_whole(matrix, extent)
    if matrix.image:
        return TiledMap(
            dtype,
            (matrix.rows // product.images, product.depth, product.images),
            (pitch, matrix.image * matrix.item_bytes),
            swizzle=row_bytes,
            box=(wide, config.depth, 1),
            l2_bytes=fetched,
        )
    return TiledMap(
        dtype,
        (wide, product.depth, matrix.rows // wide) if whole else (matrix.rows, product.depth, 1),
        (pitch, row_bytes if whole else pitch),
        swizzle=row_bytes,
        box=(wide, config.depth, extent // wide if whole else 1),
        l2_bytes=fetched,
    )


def _result_map(dtype: DType, product: Product, config: Config) -> TiledMap:
    """Return the tensor map of the result.

    Its box is 16 rows of a block of columns; either transposed or of planes, 64 rows of all columns
    of a tile.
    """
    rows_box = config.d_bytes // ITEM_BYTES or config.stored_columns(product), SLAB_ROWS
    if product.images and product.transposed:
        return TiledMap(
            dtype,
            (product.columns // product.images, product.rows, product.images),
            (product.row_stride * ITEM_BYTES, product.image_stride * ITEM_BYTES),
            swizzle=config.d_bytes,
            box=(*rows_box, 1),
        )
    if product.images:
        return TiledMap(
            dtype,
            (product.rows // product.images, product.columns, product.images),
            (product.column_stride * ITEM_BYTES, product.image_stride * ITEM_BYTES),
            swizzle=ROW_BYTES[-1],
            box=(ROW_BYTES[-1] // ITEM_BYTES, config.stored_columns(product), 1),
        )
    if product.transposed:
        return TiledMap(
            dtype,
            (product.rows, product.columns),
            (product.column_stride * ITEM_BYTES,),
            swizzle=ROW_BYTES[-1],
            box=(ROW_BYTES[-1] // ITEM_BYTES, config.stored_columns(product)),
        )
    return TiledMap(
        dtype,
        (product.columns, product.rows),
        (product.row_stride * ITEM_BYTES,),
        swizzle=config.d_bytes,
        box=rows_box,
    )
