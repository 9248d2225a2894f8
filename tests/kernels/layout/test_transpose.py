"""Copies between channels first and channels last, by tiles and by runs, for any sizes."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.layout.transpose import Transpose
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Clear, Fragment
from convgrad_service.plans.cuda.works import Copy, CopyAxis, contiguous_strides
from tests.emulator.backend import Launching, filled_by, launch_of, works_here
from tests.emulator.memory import Buffers

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

# Images, channels, pixels: whole tiles, odd numbers of pixels, few pixels, and taps of a weight.
SHAPES = {
    "whole": (2, 128, 192),
    "odd_planes": (2, 72, 131),
    "long_odd_planes": (1, 136, 1089),
    "a_tile_and_less_than_a_chunk": (2, 64, 65),
    "halves_of_chunks": (2, 64, 196),
    "images_of_49_pixels": (3, 136, 49),
    "nine_taps": (5, 200, 9),
    "three_taps": (3, 64, 3),
    "odd_both": (3, 67, 99),
    "long_runs": (1, 2048, 9),
}
TYPES = {2: DType.BFLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64}


def turned(shape: tuple[int, int, int], itemsize: int, *, back: bool) -> Copy:
    """Return the copy from (N, C, P) to (N, P, C), or back."""
    images, channels, pixels = shape
    first = contiguous_strides((images, channels, pixels))
    last = contiguous_strides((images, pixels, channels))
    sides = [(first[0], first[2], first[1]), last]
    source, target = sides[::-1] if back else sides
    axes = zip((images, pixels, channels), source, target, strict=True)
    return Copy("source", "target", TYPES[itemsize], tuple(CopyAxis(*axis) for axis in axes))


def run(fragment: Fragment, source: np.ndarray) -> np.ndarray:
    memory = Buffers({"source": source.nbytes, "target": source.nbytes}, 0xFF)
    memory.bytes["source"][...] = source.reshape(-1).view(np.uint8)
    for step in fragment.steps:
        assert not isinstance(step, Clear)
        filled = filled_by(step.arguments, memory.addresses)
        wrong = launch_of(step.instance)(
            Launching(
                filled.ctypes.data,
                memory.stretches,
                len(memory.stretches),
                step.grid,
                step.block[0],
                step.shared_bytes,
            )
        )
        assert wrong is None, f"{step.instance.name}: {wrong.decode()}"
        assert memory.spilled() is None, f"{step.instance.name}: beside {memory.spilled()}"
    return memory.bytes["target"].view(source.dtype)


@pytest.mark.parametrize("itemsize", TYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("back", [False, True], ids=["to_last", "to_first"])
def test_turned(name: str, itemsize: int, back: bool) -> None:
    images, channels, pixels = shape = SHAPES[name]
    copy = turned(shape, itemsize, back=back)
    assert Transpose().why_not(copy, H200) is None
    fragment = Transpose().launches(copy, H200)
    numbers = np.arange(prod(shape)).astype(f"u{itemsize}")
    given = numbers.reshape((images, pixels, channels) if back else shape)
    found = run(fragment, given).reshape(shape if back else (images, pixels, channels))
    wrong = np.argwhere(found != given.transpose(0, 2, 1))
    assert not len(wrong), f"{fragment.kernel}: {len(wrong)} wrong, the first at {wrong[0]}"


@pytest.mark.parametrize("name", ["odd_planes", "images_of_49_pixels", "nine_taps"])
def test_padded(name: str) -> None:
    """Channels are padded to a whole chunk with zeros."""
    images, channels, pixels = SHAPES[name]
    channels -= 3
    whole = -(-channels // 8) * 8
    first = contiguous_strides((images, channels, pixels))
    last = contiguous_strides((images, pixels, whole))
    axes = (
        CopyAxis(1, 0, 0),
        CopyAxis(images, first[0], last[0]),
        CopyAxis(pixels, 1, last[1]),
        CopyAxis(whole, first[1], 1),
    )
    copy = Copy("source", "target", DType.BFLOAT16, axes, ((0, 3, channels),), pads=True)
    assert Transpose().why_not(copy, H200) is None
    given = np.arange(1, images * channels * pixels + 1).astype("u2")
    padded = np.zeros((images, pixels, whole), "u2")
    padded[..., :channels] = given.reshape(images, channels, pixels).transpose(0, 2, 1)
    memory = Buffers({"source": given.nbytes, "target": padded.nbytes}, 0xFF)
    memory.bytes["source"][...] = given.view(np.uint8)
    (step,) = Transpose().launches(copy, H200).steps
    assert not isinstance(step, Clear)
    filled = filled_by(step.arguments, memory.addresses)
    wrong = launch_of(step.instance)(
        Launching(filled.ctypes.data, memory.stretches, len(memory.stretches), step.grid, 256, 0)
    )
    assert wrong is None
    assert (memory.bytes["target"].view("u2") == padded.reshape(-1)).all()


@pytest.mark.parametrize("itemsize", TYPES)
@pytest.mark.parametrize("shape", [(8, 24, 40), (16, 7, 72), (40, 3, 8)])
def test_rows_of_two_axes(itemsize: int, shape: tuple[int, int, int]) -> None:
    """(N, W, C) to (C, W, N): the pixels of few images are rows of one tile."""
    images, pixels, channels = shape
    source, target = contiguous_strides(shape), contiguous_strides((channels, pixels, images))
    axes = (
        CopyAxis(pixels, source[1], target[1]),
        CopyAxis(images, source[0], 1),
        CopyAxis(channels, 1, target[0]),
    )
    copy = Copy("source", "target", TYPES[itemsize], axes)
    assert Transpose().why_not(copy, H200) is None
    fragment = Transpose().launches(copy, H200)
    (step,) = fragment.steps
    assert not isinstance(step, Clear)
    assert ("Y_AXES", "2") in step.instance.defines
    given = np.arange(prod(shape)).astype(f"u{itemsize}").reshape(shape)
    found = run(fragment, given).reshape(channels, pixels, images)
    assert (found == given.transpose(2, 1, 0)).all()
