"""Operands of float32 split into bfloat16 parts, in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.float_parts import FloatTensor, float_parts
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import Operand, contiguous_strides
from tests.emulator.backend import Launching, filled_by, launch_of, works_here
from tests.emulator.memory import Buffers

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

Floats = NDArray[np.float32]
UNWRITTEN = 0xFF
LIFT, K_TILE = 16, 64
LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Tensor:
    """The canonical extents (N, C, D, H, W), and the order of axes in memory."""

    extents: tuple[int, int, int, int, int]
    order: str

    def operand(self, name: str) -> Operand:
        strides = dict.fromkeys("NCDHW", 0)
        sizes = dict(zip("NCDHW", self.extents, strict=True))
        shape = tuple(sizes[axis] for axis in self.order)
        for axis, stride in zip(self.order, contiguous_strides(shape), strict=True):
            strides[axis] = stride
        n, c, d, h, w = (strides[axis] for axis in "NCDHW")
        return Operand(name, DType.FLOAT32, (n, 0, c, d, h, w))

    def in_memory(self, array: Floats) -> Floats:
        return np.ascontiguousarray(array.transpose(["NCDHW".index(axis) for axis in self.order]))

    def tensor(self, name: str) -> FloatTensor:
        n, c, *size = self.extents
        return FloatTensor(self.operand(name), n, c, (size[0], size[1], size[2]), f"{name}_parts")


LAST, FIRST = "NDHWC", "NCDHW"
PAIRS = {
    "channels_last": (Tensor((2, 64, 1, 5, 7), LAST), Tensor((2, 40, 2, 3, 7), LAST)),
    "channels_first": (Tensor((3, 70, 1, 5, 7), FIRST), Tensor((1, 16, 4, 9, 8), FIRST)),
    "any_channels": (Tensor((2, 45, 1, 4, 3), LAST), Tensor((2, 131, 1, 4, 3), FIRST)),
    "few_channels": (Tensor((2, 3, 1, 9, 9), LAST), Tensor((1, 4, 1, 40, 40), LAST)),
    "several_rounds": (Tensor((1, 256, 1, 48, 48), LAST), Tensor((9, 64, 1, 64, 64), FIRST)),
    "narrow_tiles": (Tensor((3, 16, 1, 11, 10), FIRST), Tensor((2, 27, 1, 13, 13), FIRST)),
    # As operands of a gradient of the input: (C, K, T, R, S).
    "weight": (Tensor((24, 40, 1, 3, 3), "CNDHW"), Tensor((24, 40, 1, 3, 3), "CDHWN")),
}


def drawn(tensor: Tensor, seed: int, least: int = -10, most: int = 10) -> Floats:
    rng = np.random.default_rng(seed)
    normals = rng.standard_normal(tensor.extents)
    return np.ldexp(normals, rng.integers(least, most, tensor.extents)).astype(np.float32)


def run(
    pair: tuple[Tensor, Tensor],
    arrays: tuple[Floats, Floats],
    parts: int,
    again: bool = True,
    lift: tuple[int, int] = (LIFT, LIFT),
) -> tuple[list[Floats], float]:
    """Return both tensors' parts, (part, N, C, D, H, W), and the factor that undoes scales."""
    tensors = pair[0].tensor("x"), pair[1].tensor("y")
    split = float_parts(*tensors, parts, "", H200, lift)
    sizes = {item.name: item.size_bytes for item in split.workspace}
    sizes |= {name: array.nbytes for name, array in zip("xy", arrays, strict=True)}
    memory = Buffers(sizes, UNWRITTEN)
    for name, one, array in zip("xy", pair, arrays, strict=True):
        memory.bytes[name][...] = one.in_memory(array).reshape(-1).view(np.uint8)
    for step in split.steps if again else split.steps[:1]:
        assert isinstance(step, Launch)
        filled = filled_by(step.arguments, memory.addresses)
        wrong = launch_of(step.instance)(
            Launching(
                filled.ctypes.data, memory.stretches, len(memory.stretches), step.grid, 256, 0
            )
        )
        assert wrong is None, wrong
        assert memory.spilled() is None
    found = []
    for tensor in tensors:
        words = memory.bytes[tensor.parts].view(np.uint16).astype(np.uint32) << 16
        shape = parts, tensor.batch, *tensor.size, tensor.padded
        each = words.view(np.float32).reshape(shape)
        assert not each[..., tensor.channels :].any()
        found.append(np.moveaxis(each[..., : tensor.channels], -1, 2))
    if split.unscale is None or not again:
        return found, 1.0
    return found, float(memory.bytes[split.unscale].view(np.float32)[0])


def total(parts: Floats) -> NDArray[np.float64]:
    return np.add.reduce(parts.astype(np.float64), axis=0)


@pytest.mark.parametrize("name", PAIRS)
def test_three_parts_are_exact(seed: int, name: str) -> None:
    pair = PAIRS[name]
    arrays = drawn(pair[0], seed), drawn(pair[1], seed + 1)
    found, unscale = run(pair, arrays, 3)
    assert unscale == 2.0 ** (-2 * LIFT)
    for parts, array in zip(found, arrays, strict=True):
        assert (total(parts) == np.ldexp(array.astype(np.float64), LIFT)).all()
        for larger, smaller in pairwise(np.abs(parts)):
            assert (smaller <= larger * 2.0**-8).all()


@pytest.mark.parametrize("name", ["channels_last", "channels_first", "any_channels", "weight"])
def test_two_parts(seed: int, name: str) -> None:
    pair = PAIRS[name]
    arrays = drawn(pair[0], seed, 0, 120), drawn(pair[1], seed + 1)
    arrays[0].reshape(-1)[::7] = LARGEST
    found, _ = run(pair, arrays, 2)
    for parts, array in zip(found, arrays, strict=True):
        assert (np.abs(total(parts) - array) <= np.abs(array) * 2.0**-16).all()


def tiny(a: Floats, b: Floats) -> None:
    """All subnormals."""
    a[...] = np.ldexp(a, -136)


def large(a: Floats, b: Floats) -> None:
    """Elements that scaling would make infinite."""
    a[:, ::2] = LARGEST


def large_products(a: Floats, b: Floats) -> None:
    a[...], b[...] = np.ldexp(a, 45), np.ldexp(b, 60)


def every_magnitude(a: Floats, b: Floats) -> None:
    """Subnormals beside elements whose products with the other tensor's would overflow, scaled."""
    a[:, ::2], a[:, 1::2] = np.ldexp(a[:, ::2], -136), np.ldexp(a[:, 1::2], 90)


def every_magnitude_of_the_second(a: Floats, b: Floats) -> None:
    every_magnitude(b, a)


@pytest.mark.parametrize("name", ["channels_last", "channels_first"])
@pytest.mark.parametrize(
    "change", [tiny, large, large_products, every_magnitude, every_magnitude_of_the_second]
)
@pytest.mark.parametrize("lift", [(16, 16), (16, -12)])
def test_extremes_are_exact(
    seed: int, name: str, change: Callable[[Floats, Floats], None], lift: tuple[int, int]
) -> None:
    pair = PAIRS[name]
    arrays = drawn(pair[0], seed), drawn(pair[1], seed + 1)
    change(*arrays)
    found, unscale = run(pair, arrays, 3, lift=lift)
    powers = []
    for parts, array in zip(found, arrays, strict=True):
        assert np.isfinite(parts).all()
        power = total(parts)[array != 0] / array[array != 0]
        assert (power == power[0]).all()
        assert np.frexp(power[0])[0] == 0.5
        powers.append(power[0])
    assert unscale == 1 / np.prod(powers)
    # Scales that are exchanged change no bits of products.
    if np.prod([np.abs(array).max() for array in arrays], dtype=np.float64) < 2.0**114:
        assert unscale == 2.0**-4 or lift == (16, 16)
    # A k-tile's sum of scaled products overflows only if the sum of the products does.
    largest = np.prod([np.abs(total(parts)).max() for parts in found])
    assert 2 * K_TILE * largest < LARGEST or unscale >= 2.0**8


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", ["channels_last", "channels_first"])
def test_nonfinite(seed: int, name: str, parts: int) -> None:
    """Non-finite elements have non-finite sums, and change nothing else."""
    pair = PAIRS[name]
    arrays = drawn(pair[0], seed), drawn(pair[1], seed + 1)
    clean, unscale = run(pair, arrays, parts)
    bad = np.zeros(arrays[0].shape, bool)
    for start, value in enumerate((np.nan, np.inf, -np.inf)):
        arrays[0].reshape(-1)[start::101] = value
        bad.reshape(-1)[start::101] = True
    found, with_bad = run(pair, arrays, parts)
    assert unscale == with_bad
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(total(found[0]))[bad].any()
    assert (found[0] == clean[0])[:, ~bad].all()
    assert (found[1] == clean[1]).all()


def test_the_second_launch_writes_nothing_in_range(seed: int) -> None:
    pair = PAIRS["any_channels"]
    arrays = drawn(pair[0], seed), drawn(pair[1], seed + 1)
    first, _ = run(pair, arrays, 3, again=False)
    both, _ = run(pair, arrays, 3)
    for one, other in zip(first, both, strict=True):
        assert (one == other).all()
