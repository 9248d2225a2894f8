"""Tensor maps: how Hopper's copy engine (TMA) sees a tensor and the boxes it copies.

A map is a pure description, so plans need no driver. It becomes the 128 bytes that the hardware
reads when its tensor has an address, and those are kept: the next run with it costs nothing.
The device's side is ptx/tma.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from convgrad.dtypes import DType
from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.arguments import Packed, pack
from convgrad_service.backends.cuda.structures import MAP_ALIGNMENT, MapField
from convgrad_service.plans.cuda.works import Operand

__all__ = [
    "MAP_ALIGNMENT",
    "MAP_BYTES",
    "MapField",
    "Mapped",
    "PixelMap",
    "TensorMap",
    "TileMap",
    "pack_maps",
]

MAP_BYTES = 128

MOST_SIZE, MOST_STRIDE, MOST_STEP = 2**32, 2**40, 8
MOST_BOX, MOST_CHANNELS, MOST_PIXELS = 256, 256, 1024
# The corners of a PixelMap's box, by its spatial dimensions.
CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes, and CUtensorMapSwizzle
L2_FETCHES = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes, and CUtensorMapL2promotion
# CUtensorMapDataType
TYPES = {DType.FLOAT16: 6, DType.FLOAT32: 7, DType.FLOAT64: 8, DType.BFLOAT16: 9}
TFLOAT32 = 11
# Up to this driver, maps of tensors below this size need a bit cleared (CUTLASS clears it too).
OLD_DRIVER, SMALL_BYTES, SMALL_WORD, SMALL_BIT = 13010, 131072, 1, 1 << 21
# Encoded maps that are kept for one argument: a plan meets few addresses again and again.
KEPT = 16


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor as the copy engine sees it: dimensions innermost first, the innermost contiguous.

    Args:
        dtype: of the elements.
        sizes: of each dimension, in elements.
        strides: of each dimension but the innermost, in bytes.
        swizzle: bytes of a row within which 16-byte chunks change places: 0, 32, 64 or 128.
        steps: between elements that are copied, of each dimension; () for 1 everywhere. The
            innermost one's is 1.
        offset_bytes: where the tensor starts, from the start of its buffer.
        l2_bytes: what the L2 cache fetches at once: 0 (as needed), 64, 128 or 256.
        rounds: float32 elements become the nearest TF32 on their way, ties to even (seen on an
            H200: a NaN stays one, what lies beyond TF32's largest becomes infinite).
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int = 0
    steps: tuple[int, ...] = ()
    offset_bytes: int = 0
    l2_bytes: int = 256
    rounds: bool = False

    @property
    def dims(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """From the tensor's first byte to its last."""
        spans = zip(self.sizes[1:], self.strides, strict=True)
        row = self.sizes[0] * self.dtype.itemsize
        return row + sum((size - 1) * stride for size, stride in spans)

    @property
    def steps_or_ones(self) -> tuple[int, ...]:
        return self.steps or (1,) * self.dims

    def why_not(self) -> str | None:
        """What the hardware refuses of this map, or None."""
        if len(self.strides) != self.dims - 1 or len(self.steps_or_ones) != self.dims:
            return (
                f"{self.dims} sizes, {len(self.strides)} strides and {len(self.steps_or_ones)} "
                "steps; expected a stride fewer, and as many steps"
            )
        for size in self.sizes:
            if not 0 < size <= MOST_SIZE:
                return f"a dimension of {size}; expected 1 to 2^32"
        for stride in self.strides:
            if stride % 16 != 0 or not 0 <= stride < MOST_STRIDE:
                return f"a stride of {stride} bytes; expected a multiple of 16 below 2^40"
        for step in self.steps_or_ones:
            if not 0 < step <= MOST_STEP:
                return f"a step of {step}; expected 1 to {MOST_STEP}"
        if self.swizzle not in SWIZZLES or self.l2_bytes not in L2_FETCHES:
            return f"a swizzle of {self.swizzle} bytes, L2 fetches of {self.l2_bytes}"
        if self.offset_bytes % 16 != 0:
            return f"a start {self.offset_bytes} bytes into a buffer; expected a multiple of 16"
        return None

    def _why_not_row(self, elements: int) -> str | None:
        row = elements * self.dtype.itemsize
        if row % 16 != 0:
            return f"rows of {row} bytes; expected a multiple of 16"
        if self.swizzle and row > self.swizzle:
            return f"rows of {row} bytes with a swizzle of {self.swizzle}"
        return None


@dataclass(frozen=True, slots=True)
class TileMap(TensorMap):
    """For `load_tile` and `store_tile`: boxes of ``box`` elements of each dimension, 1 to 5.

    With a step s a box of b copies ceil(b / s) elements of that dimension.
    """

    box: tuple[int, ...] = ()

    def why_not(self) -> str | None:
        """See `TensorMap.why_not`."""
        if not 1 <= self.dims <= 5 or len(self.box) != self.dims:
            return f"{self.dims} dimensions, a box of {len(self.box)}; expected 1 to 5 of both"
        for extent in self.box:
            if not 0 < extent <= MOST_BOX:
                return f"a box of {extent}; expected 1 to {MOST_BOX}"
        return TensorMap.why_not(self) or self._why_not_row(self.box[0])


@dataclass(frozen=True, slots=True)
class PixelMap(TensorMap):
    """For `load_pixels` (im2col): ``pixels`` pixels of ``channels`` channels at a time.

    Dimensions are channels, W, H, D (as many as there are) and images. Pixels run through the
    box from ``lower`` to size - 1 + ``upper`` (W, H, D; both added to the tensor's own corners)
    in ``steps``. For a convolution's windows: lower = -pad_before, upper = pad_after -
    (kernel - 1)*dilation, steps = stride, and a tap is taken by moving it * dilation.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0

    def why_not(self) -> str | None:
        """See `TensorMap.why_not`."""
        spatial = self.dims - 2
        if spatial not in CORNERS or not len(self.lower) == len(self.upper) == spatial:
            return (
                f"{self.dims} dimensions with corners of {len(self.lower)} and {len(self.upper)}; "
                "expected 3 to 5, and two fewer"
            )
        least, most = CORNERS[spatial]
        for corner in (*self.lower, *self.upper):
            if not least <= corner <= most:
                return f"a box's corner of {corner} in {spatial}D; expected {least} to {most}"
        for size, low, high in zip(self.sizes[1:-1], self.lower, self.upper, strict=True):
            if size + high - low <= 0:
                return f"an empty box: {low} to {size - 1 + high}"
        if not 0 < self.channels <= MOST_CHANNELS or not 0 < self.pixels <= MOST_PIXELS:
            return (
                f"{self.pixels} pixels of {self.channels} channels; expected at most "
                f"{MOST_PIXELS} of {MOST_CHANNELS}"
            )
        return TensorMap.why_not(self) or self._why_not_row(self.channels)


Encode = Callable[[TensorMap, int], bytes]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Arguments with tensor maps among them: where in the structure, of which buffer, which map."""

    packed: Packed
    maps: tuple[tuple[int, str, TensorMap], ...]
    kept: dict[tuple[int, ...], bytes] = field(default_factory=dict, compare=False)

    @property
    def buffers(self) -> tuple[str, ...]:
        """See `Arguments.buffers`."""
        return (*self.packed.buffers, *(buffer for _, buffer, _ in self.maps))

    def renamed(self, names: Mapping[str, str]) -> Mapped:
        """See `Arguments.renamed`."""
        maps = ((offset, names.get(buffer, buffer), one) for offset, buffer, one in self.maps)
        return Mapped(self.packed.renamed(names), tuple(maps))

    def fill(self, addresses: Mapping[str, int]) -> bytearray:
        """See `Arguments.fill`."""
        starts = tuple([addresses[buffer] for _, buffer, _ in self.maps])
        encoded = self.kept.get(starts)
        if encoded is None:
            if len(self.kept) >= KEPT:
                self.kept.clear()
            encoded = b"".join(
                _encoded(tensor_map, start)
                for (_, _, tensor_map), start in zip(self.maps, starts, strict=True)
            )
            self.kept[starts] = encoded
        return self._placed(addresses, encoded)

    def fill_by(self, encode: Encode, addresses: Mapping[str, int]) -> bytearray:
        """The same with maps encoded by another than the driver, for tests without one."""
        encoded = [encode(one, addresses[buffer]) for _, buffer, one in self.maps]
        return self._placed(addresses, b"".join(encoded))

    def _placed(self, addresses: Mapping[str, int], encoded: bytes) -> bytearray:
        filled = self.packed.fill(addresses)
        for index, (offset, _, _) in enumerate(self.maps):
            start = index * MAP_BYTES
            filled[offset : offset + MAP_BYTES] = encoded[start : start + MAP_BYTES]
        return filled


def pack_maps(
    structure: ctypes.Structure,
    maps: Mapping[str, tuple[Operand | str, TensorMap]],
    **pointers: Operand | str | None,
) -> Mapped:
    """A structure as `pack` takes it, with the maps of buffers in fields of type `MapField`.

    Raises:
        ValueError: a map that the hardware refuses, or a field at no multiple of 64.
    """
    places = []
    for name, (given, tensor_map) in maps.items():
        offset = getattr(type(structure), name).offset
        if offset % MAP_ALIGNMENT != 0:
            raise ValueError(f"{name} lies at byte {offset}; expected a multiple of 64")
        refused = tensor_map.why_not()
        if refused is not None:
            raise ValueError(f"{name}: {refused}")
        buffer = given if isinstance(given, str) else given.buffer
        places.append((offset, buffer, tensor_map))
    packed = pack(structure, **pointers)
    # CUDA's structure has the alignment of its members, and ends at a multiple of it.
    padding = bytes(-len(packed.template) % MAP_ALIGNMENT)
    return Mapped(Packed(packed.template + padding, packed.pointers), tuple(places))


def _encoded(tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes, by the driver.

    Raises:
        DeviceUnavailable: there is no driver that knows tensor maps.
        ValueError: it refused the map.
    """
    driver = _driver()
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    encoded = (ctypes.c_uint64 * 16).from_buffer(memory, start)
    dtype = TFLOAT32 if tensor_map.rounds else TYPES[tensor_map.dtype]
    head = (
        encoded,
        ctypes.c_int(dtype),
        ctypes.c_uint32(tensor_map.dims),
        ctypes.c_void_p(address + tensor_map.offset_bytes),
        _array(ctypes.c_uint64, tensor_map.sizes),
        _array(ctypes.c_uint64, tensor_map.strides),
    )
    tail = (
        _array(ctypes.c_uint32, tensor_map.steps_or_ones),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(SWIZZLES[tensor_map.swizzle]),
        ctypes.c_int(L2_FETCHES[tensor_map.l2_bytes]),
        ctypes.c_int(0),  # zeros from outside
    )
    match tensor_map:
        case TileMap():
            box = _array(ctypes.c_uint32, tensor_map.box)
            status = driver.cuTensorMapEncodeTiled(*head, box, *tail)
        case PixelMap():
            status = driver.cuTensorMapEncodeIm2col(
                *head,
                _array(ctypes.c_int, tensor_map.lower),
                _array(ctypes.c_int, tensor_map.upper),
                ctypes.c_uint32(tensor_map.channels),
                ctypes.c_uint32(tensor_map.pixels),
                *tail,
            )
        case _:
            raise ValueError(f"{tensor_map} says nothing of what is copied")
    if status != 0:
        raise ValueError(
            f"the driver refused a tensor map (CUDA error {status}): {tensor_map} at {address:#x}"
        )
    if _driver_version() <= OLD_DRIVER and tensor_map.size_bytes < SMALL_BYTES:
        encoded[SMALL_WORD] &= ~SMALL_BIT
    return bytes(encoded)


def _array(kind: Any, values: Sequence[int]) -> ctypes.Array[Any]:
    return (kind * len(values))(*values)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuTensorMapEncodeIm2col  # noqa: B018 - an older driver has none
    except (OSError, AttributeError) as error:
        raise DeviceUnavailable(f"no driver that knows tensor maps: {error}") from error
    return driver


@lru_cache(maxsize=1)
def _driver_version() -> int:
    version = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value
