"""TMA tensor maps: descriptions of a tensor and of the boxes that are copied from it.

A map is pure data, so plans need no driver. When the tensor has an address the driver encodes the
map to the 128 bytes that the hardware reads; encoded maps are cached by address. The device
functions are in ptx/tma.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from convgrad.dtypes import DType
from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.arguments import Block, Packed, pack
from convgrad_service.backends.cuda.structures import MAP_ALIGNMENT, MapField
from convgrad_service.plans.cuda.works import Operand

__all__ = ["MAP_ALIGNMENT", "MAP_BYTES", "Im2colMap", "MapField", "MappedArguments", "TensorMap"]
__all__ += ["TiledMap", "pack_maps"]

MAP_BYTES = 128

MAX_SIZE, MAX_STRIDE, MAX_STEP = 2**32, 2**40, 8
MAX_BOX, MAX_CHANNELS, MAX_PIXELS = 256, 256, 1024
# The range of an Im2colMap's corners, by the number of spatial dimensions.
CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes, and CUtensorMapSwizzle
L2_FETCHES = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes, and CUtensorMapL2promotion
# CUtensorMapDataType
TYPES = {DType.FLOAT16: 6, DType.FLOAT32: 7, DType.FLOAT64: 8, DType.BFLOAT16: 9}
TFLOAT32 = 11
# Up to this driver version, maps of tensors below this size need a bit cleared, as in CUTLASS.
OLD_DRIVER, SMALL_BYTES, SMALL_WORD, SMALL_BIT = 13010, 131072, 1, 1 << 21
# Encoded maps that one argument caches: a plan runs on a few addresses again and again.
CACHED_MAPS = 16


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor as TMA sees it: dimensions innermost first, the innermost contiguous.

    Parameters
    ----------
    dtype
        Type of the elements.
    sizes
        Size of each dimension, in elements.
    strides
        Stride of each dimension but the innermost, in bytes.
    swizzle
        Swizzle width in bytes: 0, 32, 64 or 128.
    steps
        Traversal stride of each dimension, in elements (CUDA's ``elementStrides``); () for 1
        everywhere. The innermost one is 1.
    offset_bytes
        Start of the tensor in its buffer.
    l2_bytes
        L2 promotion size: 0 (none), 64, 128 or 256. With 128 instead of 256, on an H200, gradients
        of a weight take 0.97 of the time (42 layers, 0.79 to 1.01), others 0.995 (69 layers).
    round_to_tf32
        Round float32 elements to the nearest TF32, ties to even, while copying. (Observed on an
        H200: NaN stays NaN, values beyond TF32's largest become infinite.)
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int = 0
    steps: tuple[int, ...] = ()
    offset_bytes: int = 0
    l2_bytes: int = 128
    round_to_tf32: bool = False

    @property
    def dims(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Extent of the tensor in memory, from its first byte to its last."""
        spans = zip(self.sizes[1:], self.strides, strict=True)
        row = self.sizes[0] * self.dtype.itemsize
        return row + sum((size - 1) * stride for size, stride in spans)

    @property
    def steps_or_ones(self) -> tuple[int, ...]:
        return self.steps or (1,) * self.dims

    def why_not(self) -> str | None:
        """Return why the hardware would refuse this map, or None."""
        if len(self.strides) != self.dims - 1 or len(self.steps_or_ones) != self.dims:
            return (
                f"{self.dims} sizes, {len(self.strides)} strides and {len(self.steps_or_ones)} "
                "steps; expected a stride fewer, and as many steps"
            )
        for size in self.sizes:
            if not 0 < size <= MAX_SIZE:
                return f"a dimension of {size}; expected 1 to 2^32"
        for stride in self.strides:
            if stride % 16 != 0 or not 0 <= stride < MAX_STRIDE:
                return f"a stride of {stride} bytes; expected a multiple of 16 below 2^40"
        for step in self.steps_or_ones:
            if not 0 < step <= MAX_STEP:
                return f"a step of {step}; expected 1 to {MAX_STEP}"
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
class TiledMap(TensorMap):
    """Tiled mode (``tma_load``, ``tma_store``): boxes of ``box`` elements per dimension, 1 to 5.

    In a dimension with step s, a box of b elements copies ceil(b / s).
    """

    box: tuple[int, ...] = ()

    @classmethod
    def of_images(
        cls,
        x: Operand,
        channels: int,
        hw: Sequence[int],
        batch: int,
        box: tuple[int, ...],
        swizzle: int = 0,
    ) -> TiledMap:
        """Return the map of a channels-last activation as (C, W, H, N), like its box."""
        n, _, _, _, h, w = x.strides
        strides = tuple(max(stride * x.dtype.itemsize, 16) for stride in (w, h, n))
        sizes = (channels, hw[1], hw[0], batch)
        return cls(x.dtype, sizes, strides, swizzle=swizzle, box=box)

    def why_not(self) -> str | None:
        if not 1 <= self.dims <= 5 or len(self.box) != self.dims:
            return f"{self.dims} dimensions, a box of {len(self.box)}; expected 1 to 5 of both"
        for extent in self.box:
            if not 0 < extent <= MAX_BOX:
                return f"a box of {extent}; expected 1 to {MAX_BOX}"
        return TensorMap.why_not(self) or self._why_not_row(self.box[0])


@dataclass(frozen=True, slots=True)
class Im2colMap(TensorMap):
    """Im2col mode (``tma_load_im2col``): ``pixels`` pixels of ``channels`` channels per copy.

    Dimensions are C, W, H, D (as many as there are), N. Pixels traverse the bounding box from
    ``lower`` to size - 1 + ``upper`` (in W, H, D order) by ``steps``. For a convolution's windows,
    lower = -pad_before, upper = pad_after - (kernel - 1)*dilation, steps = stride, and a tap is the
    offset tap * dilation.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0

    def why_not(self) -> str | None:
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
        if not 0 < self.channels <= MAX_CHANNELS or not 0 < self.pixels <= MAX_PIXELS:
            return (
                f"{self.pixels} pixels of {self.channels} channels; expected at most "
                f"{MAX_PIXELS} of {MAX_CHANNELS}"
            )
        return TensorMap.why_not(self) or self._why_not_row(self.channels)


Encode = Callable[[TensorMap, int], bytes]


@dataclass(frozen=True, slots=True)
class MappedArguments:
    """Kernel arguments with tensor maps: (offset in the structure, buffer, map) for each map."""

    packed: Packed
    maps: tuple[tuple[int, str, TensorMap], ...]
    cache: dict[tuple[int, ...], bytes] = field(default_factory=dict, compare=False)

    @property
    def buffers(self) -> tuple[str, ...]:
        return (*self.packed.buffers, *(buffer for _, buffer, _ in self.maps))

    def renamed(self, names: Mapping[str, str]) -> MappedArguments:
        maps = ((offset, names.get(buffer, buffer), one) for offset, buffer, one in self.maps)
        return MappedArguments(self.packed.renamed(names), tuple(maps))

    def fill(self, addresses: Mapping[str, int]) -> bytearray:
        starts = tuple([addresses[buffer] for _, buffer, _ in self.maps])
        encoded = self.cache.get(starts)
        if encoded is None:
            if len(self.cache) >= CACHED_MAPS:
                self.cache.clear()
            encoded = b"".join(
                _encoded(tensor_map, start)
                for (_, _, tensor_map), start in zip(self.maps, starts, strict=True)
            )
            self.cache[starts] = encoded
        return self._with_maps(addresses, encoded)

    def block(self, addresses: Mapping[str, int], buffers: Sequence[str]) -> MappedBlock:
        return MappedBlock(self, addresses, buffers)

    def fill_by(self, encode: Encode, addresses: Mapping[str, int]) -> bytearray:
        """Fill with maps encoded by ``encode`` instead of the driver, for tests without one."""
        encoded = [encode(one, addresses[buffer]) for _, buffer, one in self.maps]
        return self._with_maps(addresses, b"".join(encoded))

    def _with_maps(self, addresses: Mapping[str, int], encoded: bytes) -> bytearray:
        filled = self.packed.fill(addresses)
        for index, (offset, _, _) in enumerate(self.maps):
            start = index * MAP_BYTES
            filled[offset : offset + MAP_BYTES] = encoded[start : start + MAP_BYTES]
        return filled


class MappedBlock(Block):
    """A `Block` with tensor maps: the driver replaces the address in a map that moved."""

    def __init__(
        self, arguments: MappedArguments, addresses: Mapping[str, int], buffers: Sequence[str]
    ) -> None:
        super().__init__(arguments.packed, arguments.fill(addresses), buffers)
        self._arguments = arguments
        self._starts = [addresses[buffer] for _, buffer, _ in arguments.maps]

    @cached_property
    def maps(self) -> list[tuple[int, int, int, bool]]:  # type: ignore[override]
        return [
            (offset, self._buffers.index(buffer), one.offset_bytes, _needs_clearing(one))
            for offset, buffer, one in self._arguments.maps
        ]

    def point(self, addresses: Sequence[int]) -> None:
        super().point(addresses)
        starts, replace = self._starts, _replace_address()
        for place, (at, index, offset, clear) in enumerate(self.maps):
            start = addresses[index]
            if start == starts[place]:
                continue
            status = replace(self.address + at, start + offset)
            if status != 0:
                raise ValueError(f"the driver refused a tensor map at {start:#x}: error {status}")
            if clear:
                self._words[at // 8 + SMALL_WORD] &= ~SMALL_BIT
            starts[place] = start


def pack_maps(
    structure: ctypes.Structure,
    maps: Mapping[str, tuple[Operand | str, TensorMap]],
    **pointers: Operand | str | None,
) -> MappedArguments:
    """Pack a structure as `pack` does, with tensor maps of buffers in fields of type `MapField`.

    Raises
    ------
    ValueError
        A map that the hardware would refuse, or a field that is not aligned to 64 bytes.
    """
    fields = []
    for name, (operand, tensor_map) in maps.items():
        offset = getattr(type(structure), name).offset
        if offset % MAP_ALIGNMENT != 0:
            raise ValueError(f"{name} is at byte {offset}; expected a multiple of 64")
        refused = tensor_map.why_not()
        if refused is not None:
            raise ValueError(f"{name}: {refused}")
        buffer = operand if isinstance(operand, str) else operand.buffer
        fields.append((offset, buffer, tensor_map))
    packed = pack(structure, **pointers)
    # CUDA pads the structure to a multiple of its alignment, which ctypes does not know.
    padding = bytes(-len(packed.template) % MAP_ALIGNMENT)
    return MappedArguments(Packed(packed.template + padding, packed.pointers), tuple(fields))


def _encoded(tensor_map: TensorMap, address: int) -> bytes:
    """Encode a map by the driver.

    Raises
    ------
    DeviceUnavailable
        There is no driver, or none that supports tensor maps.
    ValueError
        The driver refused the map.
    """
    driver = _driver()
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    encoded = (ctypes.c_uint64 * 16).from_buffer(memory, start)
    dtype = TFLOAT32 if tensor_map.round_to_tf32 else TYPES[tensor_map.dtype]
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
        ctypes.c_int(0),  # no interleave
        ctypes.c_int(SWIZZLES[tensor_map.swizzle]),
        ctypes.c_int(L2_FETCHES[tensor_map.l2_bytes]),
        ctypes.c_int(0),  # elements outside read as zero
    )
    match tensor_map:
        case TiledMap():
            box = _array(ctypes.c_uint32, tensor_map.box)
            status = driver.cuTensorMapEncodeTiled(*head, box, *tail)
        case Im2colMap():
            status = driver.cuTensorMapEncodeIm2col(
                *head,
                _array(ctypes.c_int, tensor_map.lower),
                _array(ctypes.c_int, tensor_map.upper),
                ctypes.c_uint32(tensor_map.channels),
                ctypes.c_uint32(tensor_map.pixels),
                *tail,
            )
        case _:
            raise TypeError(f"{tensor_map!r}; expected a TiledMap or an Im2colMap")
    if status != 0:
        raise ValueError(
            f"the driver refused a tensor map (CUDA error {status}): {tensor_map} at {address:#x}"
        )
    if _needs_clearing(tensor_map):
        encoded[SMALL_WORD] &= ~SMALL_BIT
    return bytes(encoded)


def _needs_clearing(tensor_map: TensorMap) -> bool:
    return tensor_map.size_bytes < SMALL_BYTES and _driver_version() <= OLD_DRIVER


def _array(kind: Any, values: Sequence[int]) -> ctypes.Array[Any]:
    return (kind * len(values))(*values)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuTensorMapEncodeIm2col  # noqa: B018 - an older driver has none
    except (OSError, AttributeError) as error:
        raise DeviceUnavailable(f"no driver that supports tensor maps: {error}") from error
    return driver


@lru_cache(maxsize=1)
def _replace_address() -> Any:
    replace = _driver().cuTensorMapReplaceAddress
    replace.argtypes = [ctypes.c_void_p] * 2
    return replace


@lru_cache(maxsize=1)
def _driver_version() -> int:
    version = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value
