"""The GEMMs of a 1x1 convolution (pointwise_gemm), by its operands' layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Matrix,
    Product,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import Prepared, prepare_weight
from convgrad_service.backends.cuda.kernels.layout.planes import flat_planes
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand
from convgrad_service.problems.sizes import Size3

__all__ = ["CHUNK", "SIDE", "products_of", "turned_weight"]

CHUNK = CHUNK_BYTES // ITEM_BYTES
"""Elements of 16 bytes."""
SIDE = 8
"""Channels whose planes together are whole chunks, whatever their pixels."""


@lru_cache(maxsize=16)
def products_of(work: ConvWork, *, unaligned: bool = False) -> tuple[Product, ...]:
    """Return the GEMMs that compute the work from rows of whole chunks, or (``unaligned``) others.

    There are none, one, or two, with A and B exchanged; in float32 only of whole chunks.
    """
    return tuple(one for one in _every_product(work) if one.unaligned == unaligned)


def _every_product(work: ConvWork) -> tuple[Product, ...]:
    """Return both; of rows that are no whole chunks, none with a bias of columns that are mixed."""
    x, y = _pitch(work.x, work.batch, work.input), _pitch(work.y, work.batch, work.output)
    _, k, c, *_ = work.w.strides
    inputs, outputs, pixels = work.in_channels, work.out_channels, work.pixels
    item_bytes = work.dtype.itemsize
    if item_bytes > ITEM_BYTES and (x is None or y is None):
        return _planes_in_tf32(work) if x is None and y is None else ()
    if x is not None and _writes_planes(work):
        a, b = Matrix(pixels, x, mn=False), Matrix(outputs, k, mn=False)
        whole = x % CHUNK == k % CHUNK == 0
        return (Product(a, b, inputs, 1, work.y.strides[2], stores=True),) if whole else ()
    if c != 1 and inputs > 1:
        return ()
    if x is None and y is None:
        return _planes(work)
    if x is None or y is None:
        return ()
    if work.direction == "bwd_weight":
        whole = max(x * item_bytes % CHUNK_BYTES, y * item_bytes % CHUNK_BYTES) == 0
        if not whole and item_bytes > ITEM_BYTES:
            return ()
        row = Matrix(outputs, y, mn=True, item_bytes=item_bytes)
        column = Matrix(inputs, x, mn=True, item_bytes=item_bytes)
        stores = item_bytes == ITEM_BYTES and _stores(work, k)
        if not whole:
            product = Product(row, column, pixels, k, 1, stores=False, unaligned=True)
            other = replace(product, a=column, b=row, row_stride=1, column_stride=k, swapped=True)
            return product, other
        return (
            Product(row, column, pixels, k, 1, stores),
            Product(column, row, pixels, 1, k, stores=False, swapped=True),
        )
    backward = work.direction == "bwd_data"
    read, written, depth = (y, x, outputs) if backward else (x, y, inputs)
    if item_bytes > ITEM_BYTES:
        return _in_tf32(work, read, written)
    a = Matrix(pixels, read, mn=False)
    b = Matrix(inputs if backward else outputs, k, mn=backward)
    if read % CHUNK or k % CHUNK:
        possible = _stores(work, 0) and not (backward and work.bias is not None)
        return (Product(a, b, depth, written, 1, True, unaligned=True),) * possible
    product = Product(a, b, depth, written, 1, _stores(work, written))
    if _stores(work, 0) and not product.stores and not backward:
        return product, replace(product, stores=True, unaligned=True)
    if not (product.stores and work.epilogue_free):
        return (product,)
    return product, Product(b, a, depth, 1, written, stores=True, swapped=True)


def _in_tf32(work: ConvWork, read: int, written: int) -> tuple[Product, ...]:
    """Return the GEMM of a convolution of channels last in float32, by its pixels' strides: none or
    one. Of a gradient of the input, A is the weight, as B's K must be contiguous."""
    k, (depth, channels) = work.w.strides[1], work.channels
    backward = work.direction == "bwd_data"
    whole = not any(value * 4 % CHUNK_BYTES for value in (read, written, k, channels))
    if not (whole and _stores(work, 0)) or (backward and not work.epilogue_free):
        return ()
    pixels = Matrix(work.pixels, read, mn=False, item_bytes=4)
    weight = Matrix(channels, k, mn=backward, item_bytes=4)
    if backward:
        return (Product(weight, pixels, depth, 1, written, stores=True, swapped=True),)
    return (Product(pixels, weight, depth, written, 1, stores=True),)


def _planes_in_tf32(work: ConvWork) -> tuple[Product, ...]:
    """Return the GEMMs of a convolution of channels first in float32; a gradient of the input reads
    the weight of `turned_weight`."""
    flat, (_, k, c, *_) = flat_planes(work), work.w.strides
    if flat is None or (c != 1 and work.in_channels > 1):
        return ()
    images = work.batch
    if work.direction == "bwd_weight":
        row, column = (
            Matrix(channels, one.strides[2], False, _image_stride(one, work), item_bytes=4)
            for one, channels in ((flat.y, work.out_channels), (flat.x, work.in_channels))
        )
        product = Product(row, column, work.pixels, k, 1, stores=False, summed_images=images)
        other = replace(product, a=column, b=row, row_stride=1, column_stride=k, swapped=True)
        return product, other
    (source, result), (depth, columns) = flat.sides, work.channels
    pitch = ceil_div(depth, 4) * 4 if work.direction == "bwd_data" else k
    if pitch * 4 % CHUNK_BYTES or not _stores(work, 0):
        return ()
    a = Matrix(work.pixels, source.strides[2], True, _image_stride(source, work), item_bytes=4)
    b = Matrix(columns, pitch, mn=False, item_bytes=4)
    product = Product(a, b, depth, 1, result.strides[2], stores=True, images=images)
    return (replace(product, image_stride=_image_stride(result, work)),)


def _planes(work: ConvWork) -> tuple[Product, ...]:
    """Return the GEMMs of a convolution of channels first: none, one, or two as `products_of`."""
    k = work.w.strides[1]
    for together in (1, 2, 4, SIDE):
        flat = flat_planes(work, together)
        if flat is not None:
            break
    if flat is None or (k % CHUNK and work.direction != "bwd_weight"):
        return _unaligned_planes(work)
    shifted = together > 1
    if work.direction == "bwd_weight":
        row, column = (
            Matrix(channels, one.strides[2], mn=False, image=_image_stride(one, work))
            for one, channels in ((flat.y, work.out_channels), (flat.x, work.in_channels))
        )
        pixels, images = work.pixels, work.batch
        product = Product(row, column, pixels, k, 1, _stores(work, k), summed_images=images)
        product = replace(product, together=together * shifted)
        other = replace(product, a=column, b=row, row_stride=1, column_stride=k)
        return product, replace(other, stores=False, swapped=True)
    if shifted and (work.direction == "fwd" or not work.epilogue_free):
        return _unaligned_planes(work)
    source, result = flat.sides
    depth, columns = work.channels
    channel = result.strides[2]
    a = Matrix(work.pixels, source.strides[2], mn=True, image=_image_stride(source, work))
    b = Matrix(columns, k, mn=work.direction == "bwd_data")
    if not _stores(work, 0 if shifted else channel):
        return ()
    image = _image_stride(result, work)
    product = Product(a, b, depth, 1, channel, stores=True, images=work.batch, image_stride=image)
    if not shifted:
        return (product,)
    other = replace(product, a=b, b=a, row_stride=channel, column_stride=1, swapped=True)
    return (replace(other, together=together),)


def _unaligned_planes(work: ConvWork) -> tuple[Product, ...]:
    """Return the GEMMs of channels first where planes or rows of weights are no whole chunks."""
    k, pixels = work.w.strides[1], work.pixels
    if any(_pitch(_rows_of(one), 1, work.output) != 1 for one in (work.x, work.y)):
        return ()
    if work.direction == "bwd_weight":
        row, column = (
            Matrix(channels, one.strides[2], mn=False, image=_image_stride(one, work))
            for one, channels in ((work.y, work.out_channels), (work.x, work.in_channels))
        )
        product = Product(row, column, pixels, k, 1, stores=False, summed_images=work.batch)
        product = replace(product, unaligned=True)
        return product, replace(
            product, a=column, b=row, row_stride=1, column_stride=k, swapped=True
        )
    if not (work.epilogue_free and _stores(work, 0)):
        return ()
    source, result = work.sides
    depth, rows = work.channels
    a = Matrix(rows, k, mn=work.direction == "bwd_data")
    b = Matrix(pixels, source.strides[2], mn=True, image=_image_stride(source, work))
    image = _image_stride(result, work)
    product = Product(a, b, depth, result.strides[2], 1, True, swapped=True, images=work.batch)
    return (replace(product, image_stride=image, unaligned=True),)


def turned_weight(work: ConvWork, device: CudaDevice) -> Prepared | None:
    """Return the weight with output channels contiguous if a product needs it: a gradient of the
    input, channels first in float32, of which otherwise neither operand's K would be contiguous."""
    x, y = _pitch(work.x, work.batch, work.input), _pitch(work.y, work.batch, work.output)
    planes = work.dtype is DType.FLOAT32 and x is None and y is None
    if work.direction != "bwd_data" or not planes:
        return None
    return prepare_weight(work, device, out_channels_last=True)


def _rows_of(planes: Operand) -> Operand:
    """Return it with pixels as what `_pitch` takes for channels' neighbours."""
    return replace(planes, strides=(0, 0, 1, *planes.strides[3:]))


def _image_stride(planes: Operand, work: ConvWork) -> int:
    """Return the stride between images, and any valid one where there is one image."""
    return planes.strides[0] if work.batch > 1 else SIDE * planes.strides[2]


def _writes_planes(work: ConvWork) -> bool:
    """Whether a forward pass of one row of pixels writes float32 planes: the products of col2im."""
    return (
        work.direction == "fwd"
        and work.result_dtype is not work.dtype
        and work.epilogue_free
        and work.pixels == work.output[2]
        and work.y.strides[5] == 1
    )


def _stores(work: ConvWork, pitch: int) -> bool:
    """Return `Product.stores`."""
    return (
        work.accumulate is None
        and work.activation == "none"
        and work.result_dtype is work.dtype
        and pitch % CHUNK == 0
    )


def _pitch(operand: Operand, batch: int, size: Size3) -> int | None:
    """Return the pixel stride of an operand with contiguous channels, or None if it varies."""
    n, _, channel, *spatial = operand.strides
    if channel != 1:
        return None
    found, count = None, 1
    for stride, extent in zip((*reversed(spatial), n), (*reversed(size), batch), strict=True):
        if extent == 1:
            continue
        if found is None:
            found = stride // count
        if stride != found * count:
            return None
        count *= extent
    return found or prod((spatial[2] or n,))
