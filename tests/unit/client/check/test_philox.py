"""What is drawn, to the bit, and the distance between numbers of a type."""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convgrad import check
from convgrad.check.bounds import rounded
from convgrad.check.compare import ulps_between
from convgrad.check.philox import philox


@pytest.mark.parametrize(
    ("counter", "high", "key", "words"),
    [
        (0, (0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            2**64 - 1,
            (2**32 - 1, 2**32 - 1),
            2**64 - 1,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            0x85A308D3_243F6A88,
            (0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random_numbers_are_those_of_philox(
    counter: int, high: tuple[int, int], key: int, words: tuple[int, ...]
) -> None:
    """The known answers of Random123."""
    assert tuple(philox(np.array([counter], np.uint64), high, key)[0]) == words


def test_what_is_drawn_is_what_the_reference_page_says() -> None:
    """Element by element, in Python's integers."""
    name, seed = "weight", 2**40 + 3
    high = zlib.crc32(name.encode()), 0

    def block(number: int) -> list[int]:
        return [int(word) for word in philox(np.array([number], np.uint64), high, seed)[0]]

    uniform = check.draw(name, (3, 7), "float64", seed, "uniform").reshape(-1)
    integers = check.draw(name, (3, 7), "float64", seed, "integers").reshape(-1)
    normal = check.draw(name, (3, 7), "float64", seed).reshape(-1)
    scale = float.fromhex("0x1.bb67ae8584caap-48")
    for element in range(21):
        word = block(element // 4)[element % 4]
        assert uniform[element] == word * 2.0**-31 - 1
        assert integers[element] == word * 5 // 2**32 - 2
        u, v = block(element // 2)[2 * (element % 2) :][:2]
        s = u % 2**16 + u // 2**16 + v % 2**16 + v // 2**16
        n = s * 2**32 + (u ^ v)
        assert normal[element] == float(n - 131070 * 2**32 - 2**31) * scale
    narrow = check.draw(name, (3, 7), "bfloat16", seed).reshape(-1)
    assert (narrow == normal.astype(ml_dtypes.bfloat16)).mean() > 0.9
    np.testing.assert_array_equal(
        narrow.astype(np.float64), rounded(normal, np.dtype(ml_dtypes.bfloat16))
    )


def test_distributions_are_what_they_are_called() -> None:
    normal = check.draw("a", (200_000,), "float64", 5)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.var() - 1) < 0.01
    assert np.abs(normal).max() < 3.47
    assert set(check.draw("a", (1000,), "float16", 5, "integers").astype(int)) == set(range(-2, 3))
    assert not np.array_equal(normal[:100], check.draw("b", (100,), "float64", 5))
    with pytest.raises(ValueError, match="distribution"):
        check.draw("a", (1,), "float32", 0, "cauchy")
    with pytest.raises(ValueError, match="seed"):
        check.draw("a", (1,), "float32", 2**64)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_units_in_the_last_place(dtype: Any) -> None:
    one = np.array([1.0, -1.0, 0.0, 0.0, 2.0], dtype)
    tiny = ml_dtypes.finfo(dtype).smallest_subnormal
    eps = ml_dtypes.finfo(dtype).eps
    other = np.array([1.0 + float(eps), -1.0 - float(eps), -0.0, float(tiny), 2.0], dtype)
    assert ulps_between(one, other).tolist() == [1, 1, 0, 1, 0]
    assert ulps_between(np.array([-tiny], dtype), np.array([tiny], dtype)).tolist() == [2]
