"""The instructions that Hopper kernels use: tiled and im2col copies, and wgmma on their results.

The emulator and the hardware must both agree with a simple model of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.backends.cuda.kernels.core.tensor_maps import Im2colMap, TiledMap
from tests.emulator.backend import works_here
from tests.support.kernels.hopper_probe import Emulated, OnGpu, ProbeArgs, Prober, probe_launch

Array = NDArray[Any]
SWIZZLES = (0, 32, 64, 128)
K, MN = "kMajorK", "kMajorMn"


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def prober(request: pytest.FixtureRequest) -> Prober:
    if request.param == "emulated":
        if not works_here():
            pytest.skip("the emulator is written for x86-64")
        return Emulated()
    if import_cupy().cuda.Device().compute_capability != "90":
        pytest.skip("not a Hopper GPU")
    return OnGpu()


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def bits(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    return rng.integers(1, 65536, shape).astype(np.uint16)


def strides(array: Array) -> tuple[int, ...]:
    """Return the strides of a tensor map: innermost first, without the innermost."""
    return array.strides[-2::-1]


def places(size: int, swizzle: int) -> NDArray[np.int64]:
    """Return the offset of each byte of a box in swizzled shared memory."""
    at = np.arange(size)
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return at ^ ((at >> 7 & mask) << 4)


def swizzled(box: Array, swizzle: int) -> NDArray[np.uint8]:
    lies = np.empty(box.nbytes, np.uint8)
    lies[places(box.nbytes, swizzle)] = np.ascontiguousarray(box).reshape(-1).view(np.uint8)
    return lies


def box_of(x: Array, at: Sequence[int], box: Sequence[int], steps: Sequence[int]) -> Array:
    """Return a box of x, zero outside; ``at``, ``box`` and ``steps`` are innermost first."""
    found = x
    for axis, (start, extent, step) in enumerate(zip(at, box, steps, strict=True)):
        index = np.arange(start, start + extent, step)
        dimension = x.ndim - 1 - axis
        inside = (index >= 0) & (index < x.shape[dimension])
        found = np.take(found, np.clip(index, 0, x.shape[dimension] - 1), dimension)
        shape = [-1 if d == dimension else 1 for d in range(x.ndim)]
        found = np.where(inside.reshape(shape), found, 0).astype(x.dtype)
    return found


def loaded(prober: Prober, x: Array, one: TiledMap | Im2colMap, size: int, **more: Any) -> Array:
    """Return the shared memory of each block after the copy of a box."""
    args = ProbeArgs(bytes=size)
    at, by, blocks = more["at"], more.get("by", ()), more.get("blocks", 1)
    args.at[: len(at)], args.by[: len(by)] = at, by
    defines = {"PIXELS": int(isinstance(one, Im2colMap)), "DIMS": one.dims, "CLUSTER": blocks}
    launch = probe_launch("loads", defines, args, {"first": one, "second": one}, blocks)
    out = np.zeros((blocks, size), np.uint8)
    return prober(launch, {"first": x, "second": x, "out": out})["out"]


SHAPES = {1: (1000,), 2: (37, 72), 3: (5, 37, 72), 4: (3, 5, 37, 72), 5: (2, 3, 5, 37, 72)}
STARTS = {"inside": (8, 3, 1, 0, 0), "before": (-16, -5, -1, 2, 1), "behind": (56, 30, 4, 2, 1)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("dims", SHAPES)
def test_tiles(
    prober: Prober, rng: np.random.Generator, dims: int, swizzle: int, start: str
) -> None:
    x = bits(rng, SHAPES[dims])
    box, at = ((swizzle or 128) // 2, 16, 2, 2, 2)[:dims], STARTS[start][:dims]
    one = TiledMap(DType.BFLOAT16, x.shape[::-1], strides(x), swizzle, box=box)
    wanted = box_of(x, at, box, (1,) * dims)
    found = loaded(prober, x, one, wanted.nbytes, at=at)
    assert (found == swizzled(wanted, swizzle)).all()


def test_tiles_in_steps_and_with_gaps(prober: Prober, rng: np.random.Generator) -> None:
    x = bits(rng, (9, 40, 80))
    box, steps, at = (64, 16, 4), (1, 2, 3), (0, -1, 1)
    one = TiledMap(DType.BFLOAT16, (64, 40, 9), strides(x), 128, steps, box=box)
    wanted = box_of(x[:, :, :64], at, box, steps)
    found = loaded(prober, x, one, wanted.nbytes, at=at)
    assert (found == swizzled(wanted, 128)).all(), "ceil(box / step) elements"


def test_tiles_rounded_to_tf32(prober: Prober, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 32)).astype(np.float32)
    words = x.view(np.uint32)
    # Ties, a value that rounds up to infinity, infinity and NaNs.
    words[0, :6] = [0x00001000, 0x00003000, 0x7F7FFFFF, 0xFF800000, 0x7FC00001, 0x7F800001]
    one = TiledMap(DType.FLOAT32, (32, 8), strides(x), 128, box=(32, 8), round_to_tf32=True)
    wanted = (words + 0xFFF + (words >> 13 & 1)) & ~np.uint32(0x1FFF)
    wanted[0, 4:6] = 0x7FFFE000
    found = loaded(prober, x, one, x.nbytes, at=(0, 0))
    assert (found == swizzled(wanted, 128)).all()


def test_tiles_for_all_blocks_of_a_cluster(prober: Prober, rng: np.random.Generator) -> None:
    x = bits(rng, (64, 64))
    one = TiledMap(DType.BFLOAT16, (64, 64), strides(x), 128, box=(64, 16))
    found = loaded(prober, x, one, 4096, at=(0, 8), by=(16,), blocks=2)
    assert (found == swizzled(x[8:40], 128)).all()


@pytest.mark.parametrize("blocks", [2, 5])
def test_blocks_of_a_cluster_send(prober: Prober, rng: np.random.Generator, blocks: int) -> None:
    given = bits(rng, (blocks, blocks, 1080))
    args = ProbeArgs(bytes=given[0].nbytes)
    launch = probe_launch("sends", {"SENDS": blocks}, args, {}, blocks)
    assert (prober(launch, {"out": given})["out"] == given.swapaxes(0, 1)).all()


def pixels_of(x: Array, one: Im2colMap, at: Sequence[int], by: Sequence[int]) -> Array:
    """Return rows of channels by the definition of im2col, one pixel at a time."""
    first, *spatial, image = at
    sizes, steps = one.sizes[1:-1], one.steps_or_ones[1:-1]
    rows = np.zeros((one.pixels, one.channels), x.dtype)
    for row in rows:
        pixel = [base + move for base, move in zip(spatial, by, strict=True)]
        inside = all(0 <= i < size for i, size in zip(pixel, sizes, strict=True))
        if inside and image < one.sizes[-1]:
            there = x[(image, *pixel[::-1])][first : first + one.channels]
            row[: len(there)] = there
        for axis in range(len(spatial)):
            spatial[axis] += steps[axis]
            if spatial[axis] <= sizes[axis] - 1 + one.upper[axis]:
                break
            spatial[axis] = one.lower[axis]
        else:
            image += 1
    return rows


# Shape (images, ..., W, channels); then, W first: corners, steps, the first window, the tap.
PIXELS: dict[str, tuple[tuple[int, ...], ...]] = {
    "1d": ((3, 50, 64), (-3,), (1,), (1,), (2, 0), (4,)),
    "1d_stride_3": ((3, 50, 64), (-3,), (1,), (3,), (0, 1), (2,)),
    "1d_far": ((2, 50, 64), (-300,), (280,), (7,), (0, 0), (290,)),
    "2d": ((3, 7, 11, 64), (-1, -2), (1, 0), (1, 1), (3, 2, 0), (2, 1)),
    "2d_stride_2": ((3, 9, 12, 64), (-1, -2), (0, 1), (2, 2), (2, 0, 1), (1, 2)),
    "2d_stride_3_2": ((4, 8, 13, 64), (-2, -1), (0, 1), (3, 2), (0, 0, 0), (4, 2)),
    "2d_past_the_last_image": ((2, 7, 11, 64), (-1, -1), (-1, -1), (1, 1), (5, 4, 1), (0, 2)),
    "2d_channels_tail": ((3, 7, 11, 72), (-1, -1), (-1, -1), (1, 1), (0, 0, 0), (1, 1)),
    "2d_far": ((2, 7, 11, 64), (-100, -120), (90, 120), (8, 8), (0, 0, 0), (101, 121)),
    "3d": ((2, 4, 5, 6, 64), (-1, -1, -2), (-1, -2, 0), (1, 1, 1), (2, 1, 0, 0), (2, 1, 2)),
    "3d_strides": ((2, 5, 6, 7, 64), (-1, 0, -1), (1, -1, -1), (1, 2, 3), (0, 2, 0, 0), (1, 2, 0)),
}


@pytest.mark.parametrize(("swizzle", "pixels"), [(0, 128), (32, 32), (64, 64), (128, 200)])
@pytest.mark.parametrize("name", PIXELS)
def test_pixels(
    prober: Prober, rng: np.random.Generator, name: str, swizzle: int, pixels: int
) -> None:
    shape, lower, upper, steps, (*window, image), by = PIXELS[name]
    x = bits(rng, shape)
    corner = zip(lower, window, steps, strict=True)
    at = (48 if "tail" in name else 0, *(low + i * step for low, i, step in corner), image)
    one = Im2colMap(
        DType.BFLOAT16,
        shape[::-1],
        strides(x),
        swizzle,
        (1, *steps, 1),
        lower=lower,
        upper=upper,
        channels=(swizzle or 128) // 2,
        pixels=pixels,
    )
    wanted = pixels_of(x, one, at, by)
    found = loaded(prober, x, one, wanted.nbytes, at=at, by=by)
    assert (found == swizzled(wanted, swizzle)).all()


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_stores(prober: Prober, rng: np.random.Generator, dims: int, swizzle: int) -> None:
    box = ((swizzle or 128) // 2, 16, 2, 2, 2)[:dims]
    one_of = bits(rng, SHAPES[dims])
    one = TiledMap(DType.BFLOAT16, one_of.shape[::-1], strides(one_of), swizzle, box=box)
    for start in (STARTS["inside"], STARTS["behind"]):
        at, data = start[:dims], bits(rng, box[::-1])
        args = ProbeArgs(bytes=data.nbytes)
        args.at[:dims] = at
        launch = probe_launch("stores", {"STORES": 1, "DIMS": dims}, args, {"first": one})
        found = prober(launch, {"first": one_of, "out": swizzled(data, swizzle)})["first"]
        wanted = one_of.copy()
        for index in itertools.product(*map(range, data.shape)):
            to = tuple(i + base for i, base in zip(index, at[::-1], strict=True))
            if all(0 <= i < size for i, size in zip(to, wanted.shape, strict=True)):
                wanted[to] = data[index]
        assert (found == wanted).all()


NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "float": np.float32}
DTYPES = {"bf16": DType.BFLOAT16, "f16": DType.FLOAT16, "float": DType.FLOAT32}


def product(
    prober: Prober,
    rng: np.random.Generator,
    dtype: str,
    fragments: int,
    majors: tuple[str, str],
    swizzles: tuple[int, int] = (128, 128),
    *,
    registers: bool = False,
    shift: tuple[int, int] = (0, 0),
    eight: tuple[int, int] = (8, 8),
) -> tuple[Array, Array, Array]:
    """Return a product and its factors. ``eight``: distance between groups of eight rows."""
    element, item = NUMPY[dtype], DTYPES[dtype].itemsize
    along_k = [size // item for size, major in zip(swizzles, majors, strict=True) if major == K]
    args = ProbeArgs(depth=min([*along_k, 64]))
    maps, stored, factors = [], [], []
    for i, (width, major) in enumerate(zip((64, 8 * fragments), majors, strict=True)):
        rows, side = width if major == K else args.depth, swizzles[i] // item
        columns = side if major == K else -(-width // side) * side
        index = shift[i] + np.arange(rows) // 8 * eight[i] + np.arange(rows) % 8
        values = rng.integers(-3, 4, (-(-(index[-1] + 1) // 32) * 32, columns)).astype(element)
        factor = values[index].astype(np.float64)
        factors.append(factor[:, : args.depth] if major == K else factor[:, :width].T)
        one = TiledMap(
            DTYPES[dtype], values.shape[::-1], strides(values), swizzles[i], box=(side, len(values))
        )
        maps.append(one)
        stored.append(values)
        args.shift[i], args.eight[i] = shift[i], eight[i] * swizzles[i]
        args.box_bytes[i], args.boxes[i] = len(values) * swizzles[i], columns // side
    defines = {
        "ELEMENT": dtype,
        "FRAGMENTS": fragments,
        "MAJOR_A": majors[0],
        "MAJOR_B": majors[1],
        "SWIZZLE_A": swizzles[0],
        "SWIZZLE_B": swizzles[1],
        "REGISTERS": int(registers),
    }
    launch = probe_launch("products", defines, args, {"first": maps[0], "second": maps[1]})
    given = factors[0].astype(element).reshape(-1).view(np.float32)
    out = np.concatenate([given, np.full(64 * 8 * fragments, np.nan, np.float32)])
    found = prober(launch, {"first": stored[0], "second": stored[1], "out": out})["out"]
    return found[given.size :].reshape(64, -1), factors[0], factors[1]


MAJORS = [(K, K), (K, MN), (MN, K), (MN, MN)]
PRODUCTS = [
    *(("bf16", 4, majors, (swizzle, swizzle)) for majors in MAJORS for swizzle in (32, 64, 128)),
    *(("bf16", fragments, (MN, MN), (128, 128)) for fragments in (1, 7, 10, 18, 32)),
    ("f16", 12, (MN, K), (64, 128)),
    ("float", 8, (K, K), (128, 128)),
    ("float", 3, (K, K), (32, 64)),
]


# Each needs its own compilation, so most are marked slow.
@pytest.mark.parametrize(
    ("dtype", "fragments", "majors", "swizzles"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] if i % 4 else [])
        for i, one in enumerate(PRODUCTS)
    ],
)
def test_products(
    prober: Prober,
    rng: np.random.Generator,
    dtype: str,
    fragments: int,
    majors: tuple[str, str],
    swizzles: tuple[int, int],
) -> None:
    found, a, b = product(prober, rng, dtype, fragments, majors, swizzles)
    assert (found == a @ b.T).all()


@pytest.mark.parametrize(("dtype", "major"), [("bf16", K), ("f16", MN), ("float", K)])
def test_products_from_registers(
    prober: Prober, rng: np.random.Generator, dtype: str, major: str
) -> None:
    found, a, b = product(prober, rng, dtype, 4, (K, major), registers=True)
    assert (found == a @ b.T).all()


@pytest.mark.parametrize(("major", "swizzle"), list(itertools.product((K, MN), (32, 64, 128))))
def test_operands_start_at_any_row(
    prober: Prober, rng: np.random.Generator, major: str, swizzle: int
) -> None:
    """A tap of a tile with halo starts at any row, with groups of eight rows at any distance."""
    for shift, eight in itertools.product((0, 1, 3, 7, 12), (8, 9, 10, 18)):
        for shifts, eights in (((shift, 0), (eight, 8)), ((0, shift), (8, eight))):
            found, a, b = product(
                prober,
                rng,
                "bf16",
                4,
                (major, major),
                (swizzle, swizzle),
                shift=shifts,
                eight=eights,
            )
            assert (found == a @ b.T).all(), (shifts, eights)
