"""implicit_gemm's host side: what it takes, how it splits, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import ImplicitGemm
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_model import (
    candidate_configs,
    choose_config,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import TILES, Gemm
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.families import FastestExpected, Overhead, choose
from convgrad_service.plans.cuda.program import Fragment, Launch
from convgrad_service.plans.cuda.works import ConvWork, Operand
from tests.perf.layer_problems import problem_of
from tests.perf.random_layers import random_layers
from tests.support.kernels.conv_work import ADA, pointwise

FEW = Gemm(((49, 2048),), 512, 1, 3_000_000, weight=False, irregular=False)


@pytest.mark.parametrize("device", [H200, ADA], ids=lambda device: device.name)
def test_every_config_fits(device: CudaDevice) -> None:
    steps = FEW.steps(DType.BFLOAT16)
    found = list(candidate_configs(FEW, DType.BFLOAT16, device, 2**14))
    assert found
    for config in found:
        needed = config.tile.shared_bytes(config.cluster, config.steps(FEW, DType.BFLOAT16))
        assert needed <= device.shared_bytes_per_block
        assert config.splits <= max(steps, 1)
        assert config.cluster == 1 or device.capability >= (9, 0)
        assert expected_s(FEW, DType.BFLOAT16, config, device) > 0


def test_few_tiles_are_split_over_a_cluster() -> None:
    _, config = choose_config(FEW, DType.BFLOAT16, H200, 2**14)
    assert config.cluster > 1


def test_workspace_needs_counters() -> None:
    deep = Gemm(((64, 2**20),), 64, 1, 2**28, weight=True, irregular=False)
    assert any(one.workspace > 1 for one in candidate_configs(deep, DType.BFLOAT16, H200, 64))
    assert all(one.workspace == 1 for one in candidate_configs(deep, DType.BFLOAT16, H200, 0))


@pytest.mark.parametrize(
    ("channels", "vector"), [((64, 64), 16), ((36, 24), 8), ((18, 36), 4), ((64, 18), 4)]
)
def test_vectors_follow_the_narrower_operand(channels: tuple[int, int], vector: int) -> None:
    launch = ImplicitGemm().launches(pointwise(2, channels, 8, "bwd_weight"), H200).steps[-1]
    assert isinstance(launch, Launch)
    assert dict(launch.instance.defines)["VECTOR"] == str(vector)
    assert launch.instance in ImplicitGemm().instances()


def test_odd_channels_are_copied_first() -> None:
    steps = ImplicitGemm().launches(pointwise(2, (33, 64), 8), H200).steps
    assert len(steps) == 3  # the input, the weight, the product
    last = steps[-1]
    assert isinstance(last, Launch)
    assert last.overlaps


def test_instances_are_what_launches_name() -> None:
    known = set(ImplicitGemm().instances())
    for direction in ("fwd", "bwd_data", "bwd_weight"):
        for layer in (
            pointwise(1, (512, 2048), 7, direction),
            pointwise(8, (18, 36), 28, direction),
        ):
            launch = ImplicitGemm().launches(layer, H200).steps[-1]
            assert isinstance(launch, Launch)
            assert launch.instance in known
    assert len({str(tile) for tile in TILES}) == len(TILES)


class Timed:
    """A family with a time."""

    def __init__(self, name: str, seconds: float | None, refused: str | None = None) -> None:
        self.name, self._seconds, self._refused = name, seconds, refused

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return self._refused

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        return Fragment(self.name, (), expected_s=self._seconds)

    def instances(self) -> list[object]:
        return []


OVERHEADS = {"first": Overhead(1e-6), "second": Overhead(2e-6), "none": Overhead(0.0)}


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        (Timed("first", 5e-6), Timed("second", 5e-6), "first"),
        (Timed("first", 5e-6), Timed("second", 3e-6), "second"),
        (Timed("none", None), Timed("second", 0.0), "none"),
        (Timed("unknown", 9e-6), Timed("second", 0.0), "unknown"),
        (Timed("first", 5e-6), Timed("second", 0.0, "no"), "first"),
    ],
)
def test_least_expected(first: Timed, second: Timed, winner: str) -> None:
    both = FastestExpected([first], [second], overheads=OVERHEADS)  # type: ignore[list-item]
    found = choose([both], pointwise(1, (64, 64), 7), H200)  # type: ignore[list-item]
    assert found.family == winner
    loser = {first.name, second.name} - {winner}
    assert {name for name, _ in found.passed_over} == loser
    assert all(reason for _, reason in found.passed_over)


def test_second_is_not_considered_where_the_first_refuses() -> None:
    both = FastestExpected(
        [Timed("first", 1e-6, "no")], [Timed("second", 1e-6)], overheads=OVERHEADS
    )  # type: ignore[list-item]
    last = Timed("last", None)
    found = choose([both, last], pointwise(1, (64, 64), 7), H200)  # type: ignore[list-item]
    assert found.family == "last"
    assert found.passed_over == (("first", "no"),)


def test_small_layers_take_it_and_large_ones_do_not() -> None:
    # Plain products of whole chunks of channels are pointwise_gemm's.
    small, large = pointwise(4, (162, 962), 7, "bwd_weight"), pointwise(64, (1024, 1024), 28)
    assert choose(FAMILIES.bwd_weight, small, H200).family == "implicit_gemm"
    assert choose(FAMILIES.fwd, large, H200).family != "implicit_gemm"
    tf32 = replace(small, dtype=DType.FLOAT32, result_dtype=DType.FLOAT32, precision="high")
    assert choose(FAMILIES.bwd_weight, tf32, H200).family == "implicit_gemm"
    exact = replace(tf32, precision="highest")
    assert choose(FAMILIES.bwd_weight, exact, H200).family == "implicit_gemm"


def exact(work: ConvWork) -> ConvWork:
    """Return the work in true float32."""

    def wide(operand: Operand) -> Operand:
        return replace(operand, dtype=DType.FLOAT32)

    return replace(
        work,
        dtype=DType.FLOAT32,
        result_dtype=DType.FLOAT32,
        x=wide(work.x),
        w=wide(work.w),
        y=wide(work.y),
    )


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
def test_channels_first_is_read_in_place(direction: str) -> None:
    layer = {
        "ndim": 2,
        "N": 2,
        "C": 50,
        "K": 70,
        "groups": 1,
        "input_size": [9, 11],
        "output_size": [9, 11],
        "kernel_size": [3, 3],
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
    }
    operation, buffers = {
        "fwd": ("conv_fwd", ("input", "weight", "output")),
        "bwd_data": ("conv_bwd_data", ("grad_input", "weight", "grad_output")),
        "bwd_weight": ("grouped_conv_bwd_weight", ("input", "grad_weight", "grad_output")),
    }[direction]
    problem = problem_of(layer, "float32", "NCHW", operation)
    for precision in ("high", "highest"):
        work = conv_work(replace(problem, precision=precision), direction, *buffers)
        (launch,) = ImplicitGemm().launches(work, H200).steps
        assert isinstance(launch, Launch)
        assert launch.instance in ImplicitGemm().instances()
        defines = dict(launch.instance.defines)
        assert defines["PLANES"] == "1"
        assert defines["SPLIT"] == str(int(precision == "highest"))


def test_few_terms_are_left_to_fma() -> None:
    few, many = (exact(pointwise(2, (channels, 64), 8)) for channels in (8, 16))
    assert "float32 FMAs" in str(ImplicitGemm().why_not(few, H200))
    assert ImplicitGemm().why_not(many, H200) is None


def test_random_layers_are_of_their_seed() -> None:
    first, again, other = (list(random_layers(seed, 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
