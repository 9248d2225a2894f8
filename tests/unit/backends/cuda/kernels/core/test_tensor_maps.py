"""Tensor maps: what the hardware would refuse is said before it is asked, and maps are kept."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core import tensor_maps
from convgrad_service.backends.cuda.kernels.core.tensor_maps import (
    CACHED_MAPS,
    Im2colMap,
    MapField,
    TensorMap,
    TiledMap,
    pack_maps,
)

TILE = TiledMap(DType.BFLOAT16, (64, 40, 6), (128, 5120), 128, box=(64, 8, 2))
PIXELS = Im2colMap(
    DType.BFLOAT16,
    (64, 11, 7, 3),
    (128, 1408, 9856),
    128,
    lower=(-1, -1),
    upper=(-1, -1),
    channels=64,
    pixels=128,
)


class Args(ctypes.Structure):
    _fields_ = (("map", MapField), ("x", ctypes.c_uint64), ("late", MapField))


def test_what_fits_is_not_refused() -> None:
    assert TILE.why_not() is None
    assert PIXELS.why_not() is None
    assert TILE.size_bytes == 64 * 40 * 6 * 2
    assert TiledMap(DType.FLOAT32, (1000,), (), box=(256,)).why_not() is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(TILE, box=(64, 8)), "expected 1 to 5 of both"),
        (replace(TILE, box=(64, 257, 2)), "a box of 257"),
        (replace(TILE, box=(72, 8, 2)), "rows of 144 bytes with a swizzle of 128"),
        (replace(TILE, box=(4, 8, 2)), "rows of 8 bytes"),
        (replace(TILE, strides=(120, 5120)), "a stride of 120 bytes"),
        (replace(TILE, strides=(128,)), "expected a stride fewer"),
        (replace(TILE, sizes=(64, 0, 6)), "a dimension of 0"),
        (replace(TILE, steps=(1, 9, 1)), "a step of 9"),
        (replace(TILE, swizzle=48), "a swizzle of 48"),
        (replace(TILE, offset_bytes=8), "a start 8 bytes into a buffer"),
        (replace(PIXELS, lower=(-129, -1)), "a box's corner of -129 in 2D; expected -128 to 127"),
        (replace(PIXELS, upper=(-20, -1)), "an empty box"),
        (replace(PIXELS, lower=(-1,)), "expected 3 to 5, and two fewer"),
        (replace(PIXELS, pixels=1025), "1025 pixels of 64 channels"),
        (replace(PIXELS, channels=128), "rows of 256 bytes"),
    ],
)
def test_what_the_hardware_refuses_is_said(changed: TensorMap, said: str) -> None:
    assert said in (changed.why_not() or "")
    with pytest.raises(ValueError, match="map: "):
        pack_maps(Args(), {"map": ("x", changed)})


def test_corners_reach_as_far_as_the_dimensions_leave_bits() -> None:
    one = replace(PIXELS, sizes=(64, 11, 3), strides=(128, 1408), lower=(-300,), upper=(280,))
    assert one.why_not() is None
    three = replace(
        PIXELS, sizes=(64, 11, 7, 5, 3), strides=(128, 1408, 9856, 49280), lower=(-17, 0, 0)
    )
    assert "expected -16 to 15" in (replace(three, upper=(0, 0, 0)).why_not() or "")


def test_a_map_is_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def encoded(_: TensorMap, address: int) -> bytes:
        asked.append(address)
        return address.to_bytes(128, "little")

    monkeypatch.setattr(tensor_maps, "_encoded", encoded)
    arguments = pack_maps(Args(), {"map": ("x", TILE)}, x="x")
    for address in (4096, 8192, 4096):
        filled = arguments.fill({"x": address})
        assert int.from_bytes(filled[:128], "little") == address
        assert int.from_bytes(filled[128:136], "little") == address
        assert len(filled) % 64 == 0, "as long as the structure is in CUDA"
    assert asked == [4096, 8192]
    for address in range(0, 4096 * (CACHED_MAPS + 4), 4096):
        arguments.fill({"x": address})
    assert len(arguments.cache) <= CACHED_MAPS


def test_a_block_points_its_maps_and_pointers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(_: TensorMap, address: int) -> bytes:
        return address.to_bytes(8, "little") + bytes([255]) * 120

    def replace_address(at: int, address: int) -> int:
        replaced.append(address)
        ctypes.c_uint64.from_address(at).value = address
        return int(address == 64)

    replaced: list[int] = []
    monkeypatch.setattr(tensor_maps, "_encoded", encoded)
    monkeypatch.setattr(tensor_maps, "_replace_address", lambda: replace_address)
    monkeypatch.setattr(tensor_maps, "_driver_version", lambda: tensor_maps.OLD_DRIVER)

    class Two(ctypes.Structure):
        _fields_ = (("a", MapField), ("b", MapField), ("x", ctypes.c_uint64), ("n", ctypes.c_int))

    start = replace(TILE, offset_bytes=128)
    arguments = pack_maps(Two(x=512, n=7), {"a": ("x", start), "b": ("y", TILE)}, x="z")
    buffers = ("z", "y", "x")
    block = arguments.block({"x": 4096, "y": 8192, "z": 12288}, buffers)
    assert block.address % 64 == 0
    assert (
        ctypes.string_at(block.address, 264)
        == bytes(arguments.fill({"x": 4096, "y": 8192, "z": 12288}))[:264]
    )
    block.point((256, 8192, 1024))
    words = (ctypes.c_uint64 * 34).from_address(block.address)
    assert replaced == [1024 + 128], "the one map that moved"
    assert (words[0], words[16], words[32], words[33]) == (1152, 8192, 256 + 512, 7)
    small = (2**64 - 1) & ~tensor_maps.SMALL_BIT
    assert words[1] == small, "as in a map that is encoded anew"
    assert words[2:16] == [2**64 - 1] * 14
    with pytest.raises(ValueError, match="refused a tensor map"):
        block.point((0, 64, 1024))


def test_a_field_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="late is at byte 136"):
        pack_maps(Args(), {"late": ("x", TILE)})
