"""Ascend's formats and regions: the same gradient, packed or of a region."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Backend
from convgrad_service.problems import problem_from, run_in_pieces
from tests.support.kernels.harness import GATES, check, drawn, run
from tests.support.numerics import reference_pool as formats
from tests.support.numerics.arrays import Arrays
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import BACKPROP_FORMATS, Case, conv3d_backprop_input
from tests.support.numerics.geometries import CONVS, Conv
from tests.support.numerics.oracle import expected

NAMES = ("3d_plain", "3d_stride_beyond_kernel", "3d_rows_past_the_last_window", "3d_groups_2")
CASES = {name: conv3d_backprop_input(name, CONVS[name]) for name in NAMES}
CASES["3d_channels_17"] = conv3d_backprop_input(
    "3d_channels_17", Conv(2, 17, 33, (3, 4, 2), (2, 3, 2), 1, 1, (1, 1, 2))
)
CASES["3d_depthwise"] = conv3d_backprop_input("3d_depthwise", CONVS["3d_depthwise"])


def packed(array: NDArray[Any], form: str, groups: int) -> NDArray[Any]:
    c0 = formats.c0_of(array.itemsize)
    if form == "NDC1HWC0":
        return formats.pack_ndc1hwc0(array, c0)
    if form == "FRACTAL_Z_3D":
        return formats.pack_fractal_z_3d(array, groups, c0)
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if form == "NDHWC" else array


def plain(array: NDArray[Any], form: str, channels: int) -> NDArray[Any]:
    if form == "NDC1HWC0":
        spare = array[:, :, -1, :, :, channels % array.shape[-1] or array.shape[-1] :]
        assert not spare.any(), "padded channels are not zero"
        return formats.unpack_ndc1hwc0(array, channels)
    return np.moveaxis(array, -1, 1) if form == "NDHWC" else array


def packed_request(
    case: Case, tensors: Arrays, forms: tuple[str, str, str], **params: Any
) -> tuple[Arrays, dict[str, Any]]:
    """Return a case's tensors packed in formats, and the parameters that name the formats."""
    sent = {
        "grad_output": packed(tensors["grad_output"], forms[0], case.groups),
        "weight": packed(tensors["weight"], forms[1], case.groups),
    }
    asked = {
        **case.params,
        "grad_output_format": forms[0],
        "weight_format": forms[1],
        "output_format": forms[2],
        **params,
    }
    if "FRACTAL" in forms[1]:
        asked["weight_size"] = case.shapes["weight"]
    return sent, asked


def backprop(
    backend: Backend, case: Case, tensors: Arrays, forms: tuple[str, str, str], **params: Any
) -> Arrays:
    """Run a case with its tensors in formats, and unpack the result."""
    sent, asked = packed_request(case, tensors, forms, **params)
    found = run(backend, case.operation, sent, asked).outputs["grad_input"]
    channels = case.shapes["weight"][1] * case.groups
    return {"grad_input": plain(found, forms[2], channels)}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("forms", BACKPROP_FORMATS, ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_formats(
    backend: Backend, seed: int, name: str, forms: tuple[str, str, str], dtype: str, gate: str
) -> None:
    case = CASES[name]
    tensors, wanted = drawn(seed, case, dtype, gate)
    check(backprop(backend, case, tensors, forms), wanted, gate, f"seed {seed}, {case.id} {dtype}")


def test_float64_in_plain_formats(backend: Backend, seed: int) -> None:
    for case in CASES.values():
        tensors, wanted = drawn(seed, case, "float64", "bounded")
        found = backprop(backend, case, tensors, ("NDHWC", "NCDHW", "NDHWC"))
        check(found, wanted, "bounded", case.id)


def test_the_filling_of_packed_channels_is_not_read(backend: Backend, seed: int) -> None:
    """The values of padded channels do not affect the result."""
    case = CASES["3d_channels_17"]
    tensors, wanted = drawn(seed, case, "float32", "exact")
    sent = {
        "grad_output": packed(tensors["grad_output"], "NDC1HWC0", 1),
        "weight": packed(tensors["weight"], "FRACTAL_Z_3D", 1),
    }
    sent["grad_output"][:, :, -1, :, :, 33 % 8 :] = np.nan
    sent["weight"][:, 2, 1:, :] = np.nan
    params = {
        **case.params,
        "grad_output_format": "NDC1HWC0",
        "weight_format": "FRACTAL_Z_3D",
        "weight_size": case.shapes["weight"],
    }
    found = run(backend, case.operation, sent, params).outputs
    check(found, wanted, "exact", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("parts", [2, 5, 100])
@pytest.mark.parametrize("forms", BACKPROP_FORMATS[:3], ids="-".join)
def test_packed_pieces_are_the_whole(
    backend: Backend, seed: int, forms: tuple[str, str, str], parts: int
) -> None:
    for case in CASES.values():
        tensors, _ = drawn(seed, case, "bfloat16", "bounded")
        for region in (None, {"d": (0, 2), "h": (1, 3)}):
            sent, asked = packed_request(case, tensors, forms, region=region)
            request = validate(OPERATIONS[case.operation].request, {**sent, **asked})
            problem = problem_from(case.operation, request)
            whole = backend.run(problem, sent).outputs["grad_input"]
            found = run_in_pieces(problem, sent, parts, lambda p, t: backend.run(p, t).outputs)
            assert_same_bits(found["grad_input"], whole, f"seed {seed}, {case.id} {region}")


REGIONS: list[dict[str, tuple[int, int]]] = [
    {"d": (0, 1), "h": (0, 2)},
    {"d": (1, 3), "h": (1, 4)},
    {"d": (2, 3), "h": (2, 3)},
    {"h": (1, 3)},
    {"d": (0, 2)},
]


@pytest.mark.parametrize("region", REGIONS, ids=str)
@pytest.mark.parametrize("forms", BACKPROP_FORMATS[:3], ids="-".join)
def test_a_region_is_that_part_of_the_whole(
    backend: Backend, seed: int, forms: tuple[str, str, str], region: dict[str, tuple[int, int]]
) -> None:
    for case in CASES.values():
        tensors, whole = drawn(seed, case, "float32", "bounded")
        params = {**case.params, "region": region}
        wanted = expected(case.operation, tensors, params)
        found = backprop(backend, case, tensors, forms, region=region)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {region}")
        assert set(wanted) == set(whole)


def test_output_padding_instead_of_an_input_size(backend: Backend, seed: int) -> None:
    for name in NAMES:
        case, conv = CASES[name], CONVS[name]
        params = {key: value for key, value in case.params.items() if key != "input_size"}
        params["output_padding"] = conv.rows_left_over
        asked = replace(case, name=f"{name}-output_padding", params=params)
        tensors, wanted = drawn(seed, case, "float32", "bounded")
        found = run(backend, asked.operation, tensors, params).outputs
        check(found, wanted, "bounded", asked.id)


@pytest.mark.parametrize(
    "region", [{"d": (0, 9)}, {"d": (2, 2)}, {"h": (3, 1)}, {"h": (-1, 2)}], ids=str
)
def test_regions_outside_are_refused(
    backend: Backend, seed: int, region: dict[str, tuple[int, int]]
) -> None:
    case = CASES["3d_plain"]
    tensors, _ = drawn(seed, case, "float32", "exact")
    with pytest.raises(InvalidProblem, match="region"):
        run(backend, case.operation, tensors, {**case.params, "region": region})
