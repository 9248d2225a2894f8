"""simt_gemm's host side: what it takes, and how a product is divided among threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.simt_gemm import (
    SHARED_BYTES,
    SimtGemm,
    candidate_configs,
    expected_s,
    product_of,
)
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import ConvWork, Direction
from tests.support.kernels.conv_work import pointwise, work_of

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd_data", "bwd_weight")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("channels", "vectors"), [((64, 32), "1"), ((66, 32), "0")])
def test_vectors_are_whole(direction: Direction, channels: tuple[int, int], vectors: str) -> None:
    (launch,) = SimtGemm().launches(pointwise(2, channels, 1, direction), H200).steps
    assert isinstance(launch, Launch)
    assert dict(launch.instance.defines)["VECTORS"] == vectors
    assert launch.instance in SimtGemm().instances()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_config_fits(direction: Direction) -> None:
    product = product_of(pointwise(16, (240, 960), 1, direction))
    found = list(candidate_configs(product))
    assert found
    for config in found:
        assert config.slices << config.across_log + config.down_log == config.threads
        assert config.threads * SHARED_BYTES <= 48 * 1024
        assert expected_s(product, DType.FLOAT32, config, H200) > 0


def test_few_sums_of_many_terms_are_divided() -> None:
    few = pointwise(1, (100, 1200), 1, "bwd_data")
    config = SimtGemm().solve(few, H200)
    assert not isinstance(config, str)
    assert config.slices >= 32


def refusals() -> list[tuple[ConvWork, str]]:
    work = pointwise(2, (64, 32), 4)
    return [
        (replace(work, activation="relu"), "epilogue"),
        (replace(work, result_dtype=DType.FLOAT64), "another type"),
        (replace(work, split_k=2), "split_k"),
        (pointwise(256, (512, 512), 16), "products are more"),
        (replace(work, x=replace(work.x, strides=(1024, 1024, 16, 0, 4, 1))), "contiguous"),
        (replace(work, y=replace(work.y, strides=(512, 512, 1, 0, 160, 32))), "follow"),
    ]


@pytest.mark.parametrize(("work", "reason"), refusals(), ids=[reason for _, reason in refusals()])
def test_refuses(work: ConvWork, reason: str) -> None:
    assert reason in str(SimtGemm().why_not(work, H200))


def test_longer_layers_are_left_to_others() -> None:
    work = pointwise(16, (240, 960), 1, "bwd_data")
    assert SimtGemm().why_not(work, H200) is None
    assert "expected to take" in str(SimtGemm(most_s=1e-6).why_not(work, H200))
    assert "products are more" in str(SimtGemm(most_products=2**20).why_not(work, H200))
    assert "the narrower side" in str(SimtGemm(most_channels=4).why_not(work, H200))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_planes_are_products_of_an_image(direction: Direction) -> None:
    work = work_of(direction, batch=3, channels=(8, 12), size=6, kernel=1, pad=0, layout="NCHW")
    product = product_of(work)
    summed = direction == "bwd_weight"
    assert (product.images, product.summed) == ((1, 3) if summed else (3, 1))
    assert product.units == (27 if summed else work.channels[0] // 4)
    (launch,) = SimtGemm().launches(work, H200).steps
    assert isinstance(launch, Launch)
    assert launch.grid[2] == product.images
    assert launch.instance in SimtGemm().instances()
