"""Tensor maps for the emulator: 128 bytes that hold the description itself (``EncodedMap``)."""

from __future__ import annotations

import struct

from convgrad_service.backends.cuda.kernels.core.tensor_maps import (
    MAP_BYTES,
    Im2colMap,
    TensorMap,
    TiledMap,
)

__all__ = ["encode"]

MAGIC = 0x70616D74
_LAYOUT = struct.Struct("<I4BQ4Q5I5BB5H3h3h")


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """Encode a tensor map for the emulated copies; see transfers.hpp."""
    dims = tensor_map.dims
    assert tensor_map.why_not() is None, tensor_map.why_not()
    assert address % 16 == 0, f"a tensor at {address:#x}"
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    match tensor_map:
        case TiledMap():
            box = tensor_map.box
        case Im2colMap():
            box = (tensor_map.channels, tensor_map.pixels)
            lower, upper = tensor_map.lower, tensor_map.upper
        case _:
            raise TypeError(f"{tensor_map!r}; expected a TiledMap or an Im2colMap")
    packed = _LAYOUT.pack(
        MAGIC,
        dims,
        tensor_map.dtype.itemsize,
        tensor_map.swizzle,
        isinstance(tensor_map, Im2colMap),
        address + tensor_map.offset_bytes,
        *_padded(tensor_map.strides, 4),
        *_padded(tensor_map.sizes, 5),
        *_padded(tensor_map.steps_or_ones, 5),
        tensor_map.round_to_tf32,
        *_padded(box, 5),
        *_padded(lower, 3),
        *_padded(upper, 3),
    )
    return packed.ljust(MAP_BYTES, b"\0")


def _padded(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (*values, *(0,) * (count - len(values)))
