"""Depthwise convolutions without repacking: strips at all corners of images and of shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_pairs import (
    PAIR_TILES,
    DepthwisePairs,
    PairTile,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import layer
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.nonfinite import assert_rule, check_rule

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
Place = Callable[..., Backend]
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]

LAYERS = {
    "kernel_3": layer(2, 16, (9, 14), (3, 3), 1, 1),
    "kernel_3_several_tiles_of_channels": layer(2, 104, (5, 14), (3, 3), 1, 1),
    "kernel_5_odd_batch": layer(3, 24, (8, 19), (5, 5), 1, 2),
    "kernel_5_uneven_padding": layer(2, 56, (8, 28), (5, 5), 1, ((0, 3), (4, 1))),
    "kernel_7": layer(2, 8, (7, 14), (7, 7), 1, 3),
    "kernel_7_odd_batch": layer(5, 40, (15, 14), (7, 7), 1, 3),
    "kernel_9": layer(2, 24, (9, 14), (9, 9), 1, 4),
    "kernel_9_many_images": layer(20, 8, (5, 6), (9, 9), 1, 4),
    "kernel_13": layer(2, 40, (15, 20), (13, 13), 1, 6),
    "kernel_13_odd_batch": layer(5, 8, (7, 21), (13, 13), 1, 6),
    "kernel_11_uneven_padding": layer(3, 16, (8, 19), (11, 11), 1, ((0, 8), (9, 1))),
    "kernel_11_many_images": layer(20, 8, (5, 6), (11, 12), 1, (5, 6)),
    "more_strips_than_a_tile": layer(1, 16, (4, 150), (7, 7), 1, 3),
    "many_images_a_tile": layer(20, 8, (5, 6), (3, 3), 1, 1),
    "fewer_images_than_a_tile_has": layer(1, 8, (3, 5), (5, 5), 1, 2),
    "kernel_between_two_instances": layer(2, 16, (6, 9), (2, 4)),
    "one_row_of_taps": layer(2, 8, (3, 21), (1, 8), 1, (0, 3)),
    "one_tap": layer(2, 8, (3, 9), (1, 1)),
    "stride_2": layer(2, 16, (12, 19), (3, 3), 2, 1),
    "stride_2_even": layer(2, 48, (16, 28), (3, 3), 2, 1),
    "stride_2_uneven_padding": layer(2, 16, (11, 16), (3, 3), 2, ((0, 1), (2, 0))),
    "stride_2_kernel_5": layer(2, 16, (11, 18), (5, 5), 2, 2),
    "stride_2_kernel_4": layer(9, 16, (11, 8), (4, 4), 2, 1),
    "stride_2_kernel_2": layer(2, 16, (11, 18), (2, 2), 2),
    "stride_2_kernel_1": layer(2, 16, (11, 18), (1, 1), 2),
    "padding_beyond_the_kernel": layer(2, 8, (5, 6), (3, 3), 1, 4),
    "dilated": layer(2, 8, (9, 13), (3, 3), 1, 2, 2),
    "dilated_by_two_steps": layer(2, 8, (9, 13), (3, 2), 2, 3, (1, 3)),
}


def case_of(operation: str, name: str) -> Case:
    case = FROM_CONV[operation](name, LAYERS[name])
    return replace(case, shapes={key: of for key, of in case.shapes.items() if key != "bias"})


CASES = [case_of("conv_bwd_data", name) for name in LAYERS]
# One kernel computes both directions.
FORWARD = ("kernel_3", "kernel_5_uneven_padding", "kernel_7", "one_row_of_taps", "dilated")
CASES += [case_of("conv_fwd", name) for name in FORWARD]
CASES += [
    replace(FROM_CONV["conv_fwd"](name, LAYERS[name]), name=f"{name}_with_bias") for name in FORWARD
]
CASES.append(case_of("conv_bwd_data", "kernel_5_uneven_padding").with_params("scaled", alpha=2.0))


def tiles_of(number: int) -> tuple[PairTile, ...]:
    """One tile per kernel, the last or, with ``number`` 0, the first."""
    ordered = PAIR_TILES[::-1] if number == 0 else PAIR_TILES
    return tuple({(tile.kernel_rows, tile.stride): tile for tile in ordered}.values())


class OnFew(DepthwisePairs):
    """The family with one tile per kernel, planned for few multiprocessors.

    A block's share then has several tiles of strips.
    """

    def __init__(self, tile: int, multiprocessors: int) -> None:
        super().__init__(tiles_of(tile), anything=True)
        self._multiprocessors = multiprocessors

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        return super().launches(work, replace(device, multiprocessors=self._multiprocessors))


@lru_cache
def _backend(tile: int, multiprocessors: int, place: Place = EmulatedBackend) -> Backend:
    families = [OnFew(tile, multiprocessors)]
    return place(families=replace(FAMILIES, fwd=families, bwd_data=families))


def _compare(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    found = answers(backend, case, tensors, "NHWC")
    check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize(("dtype", "gate"), [("bfloat16", "exact"), ("float16", "bounded")])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    _compare(backend, seed, case, dtype, gate)


@emulated
@pytest.mark.parametrize(
    ("tile", "multiprocessors", "dtype", "gate"),
    [
        (0, 132, "bfloat16", "exact"),
        (1, 2, "bfloat16", "bounded"),
        *(
            pytest.param(tile, multiprocessors, dtype, gate, marks=pytest.mark.slow)
            for tile in (0, 1)
            for multiprocessors in (1, 2, 132)
            for dtype, gate in (("bfloat16", "exact"), ("float16", "bounded"))
            if (tile, multiprocessors, dtype) != (0, 132, "bfloat16")
        ),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_emulated(
    seed: int, case: Case, tile: int, multiprocessors: int, dtype: str, gate: str
) -> None:
    _compare(_backend(tile, multiprocessors), seed, case, dtype, gate)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_is_not_finite_reaches_what_it_meets_and_no_more(
    seed: int, case: Case, place: Place
) -> None:
    check_rule(_backend(0, 1, place), seed, case, "bfloat16", "NHWC")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name", ["more_strips_than_a_tile", "many_images_a_tile", "stride_2_kernel_4"]
)
def test_rows_of_nan(seed: int, name: str, place: Place) -> None:
    """Of rows that are NaN in all strips of a tile, no products are computed."""
    case = case_of("conv_bwd_data", name)
    finite = drawn(seed, case, "float16", "bounded")[0]
    y = finite["grad_output"]
    rows = np.zeros(y.shape, bool)
    rows[:, :, : y.shape[2] // 2] = True
    finite["grad_output"] = np.where(rows, y.dtype.type(0), y)
    spoilt = {**finite, "grad_output": np.where(rows, y.dtype.type(np.nan), y)}
    backend = _backend(0, 1, place)
    found, clean = (answers(backend, case, tensors, "NHWC") for tensors in (spoilt, finite))
    assert_rule(case, spoilt, found, clean)
