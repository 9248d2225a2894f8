"""pointwise_gemm's host side: what it takes, how it splits, which instances plans name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import PointwiseGemm
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_model import chosen, timed
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_products import products_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import CLUSTERS, Config
from convgrad_service.backends.cuda.tuning.candidates import candidates
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.program import Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Direction
from tests.support.kernels.conv_work import ADA, pointwise, work_of

FAMILY, COUNTERS = PointwiseGemm(), 2**14
INSTANCES = frozenset(FAMILY.instances())
UNALIGNED_INSTANCES = frozenset(PointwiseGemm(unaligned=True).instances())
HALF = replace(H200, multiprocessors=66)
LAYERS = (
    (1, (320, 1280), 7),
    (32, (24, 144), 56),
    (8, (64, 64), 112),
    (1, (2048, 1000), 1),
    (2, (8, 16), 3),
    (64, (1024, 1024), 14),
)
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", [H200, HALF], ids=["whole", "half"])
@pytest.mark.parametrize(("batch", "channels", "size"), LAYERS)
def test_every_configuration_fits(
    batch: int, channels: tuple[int, int], size: int, device: CudaDevice, direction: str
) -> None:
    work = pointwise(batch, channels, size, direction)
    products = products_of(work)
    assert len(products) == 2
    for product in products:
        for time_s, config in timed(product, device, COUNTERS):
            stages = config.stages(product, device)
            assert time_s > 0
            assert stages >= min(3, config.steps_each(product))
            assert config.shared_bytes(product, stages) <= device.shared_bytes_per_block
            assert config.splits <= config.steps(product)
            rows, columns = config.tiles(product)
            if config.cluster > 1:
                most = max(1, CLUSTERS[config.cluster] * device.multiprocessors // 132)
                assert rows * columns * config.parts <= most
            if config.in_grid:
                assert rows * columns * config.parts <= device.multiprocessors
            if not config.reduces:
                assert product.stores
    assert FAMILY.why_not(work, device) is None
    (step,) = FAMILY.launches(work, device).steps
    assert isinstance(step, Launch)
    assert step.instance in INSTANCES


def test_tiles_of_few_waves_are_transposed() -> None:
    # 6,272 pixels and 256 channels: 98 tiles of 128 x 128, but 122 of 128 channels x 104 pixels.
    work = pointwise(32, (256, 1024), 14, "bwd_data")
    usual, transposed = products_of(work)
    assert (usual.kind, transposed.kind) == ("gather", "transposed")
    config = Config(128, 104)
    assert config in [one for _, one in timed(transposed, H200, COUNTERS)]
    (step,) = PointwiseGemm(config, swapped=True).launches(work, H200).steps
    assert isinstance(step, Launch)
    assert step.grid == (61, 2, 1)
    assert step.instance in INSTANCES


def test_blocks_of_a_cluster_share_weights() -> None:
    # 25,088 pixels: 196 tiles of 128 x 80, in clusters of four, of which 30 run at a time.
    work = pointwise(128, (80, 480), 14, "bwd_data")
    product, _ = products_of(work)
    found = [config for _, config in timed(product, H200, COUNTERS) if config.multicast > 1]
    config = Config(128, 80, multicast=4)
    assert config in found
    for one in found:
        assert Config.named(str(one)) == one
        assert one.stages(product, H200) >= min(3, one.steps_each(product))
    (step,) = PointwiseGemm(config).launches(work, H200).steps
    assert isinstance(step, Launch)
    assert (step.grid, step.cluster) == ((120, 1, 1), 4)
    assert step.instance in INSTANCES
    forward, *_ = products_of(pointwise(128, (80, 480), 14))
    assert all(config.multicast == 1 for _, config in timed(forward, H200, COUNTERS))


def test_only_rounded_sums_are_transposed() -> None:
    scaled = replace(pointwise(8, (64, 64), 28, "bwd_data"), alpha=2.0)
    assert [product.kind for product in products_of(scaled)] == ["gather"]


def test_splits_need_counters() -> None:
    (product, _) = products_of(pointwise(32, (64, 64), 112, "bwd_weight"))
    assert any(config.parts > 1 for _, config in timed(product, H200, COUNTERS))
    assert all(config.parts == 1 for _, config in timed(product, H200, 0))


@pytest.mark.usefixtures("uncorrected")
def test_the_least_time_is_chosen() -> None:
    products = products_of(pointwise(8, (144, 24), 28, "bwd_weight"))
    found = chosen(products, H200, COUNTERS)
    assert found is not None
    assert found[0] == min(time_s for one in products for time_s, _ in timed(one, H200, COUNTERS))


def test_results_that_the_copy_engine_cannot_store_are_split() -> None:
    work = pointwise(8, (64, 64), 28, "bwd_weight")
    wide = replace(work, result_dtype=DType.FLOAT32)
    for product in products_of(wide):
        assert not product.stores
        assert all(config.reduces for _, config in timed(product, H200, COUNTERS))


@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({"dtype": DType.FLOAT32}, H200, "float32"),
        ({"split_k": 4}, H200, "split_k"),
        ({}, ADA, "sm_90a"),
    ],
)
def test_what_it_leaves_to_others(
    changes: dict[str, object], device: CudaDevice, said: str
) -> None:
    work = replace(pointwise(1, (64, 64), 7), **changes)  # type: ignore[arg-type]
    assert said in (FAMILY.why_not(work, device) or "")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [(36, 64), (64, 36), (27, 162), (38, 1044)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_channels_that_are_no_whole_chunks(
    direction: Direction, channels: tuple[int, int], layout: str
) -> None:
    work = work_of(direction, batch=5, channels=channels, size=7, kernel=1, pad=0, layout=layout)
    product = products_of(work, unaligned=True)[0]
    assert product.straddles == bool(layout == "NCHW" or channels[0] % 2)
    assert PointwiseGemm(unaligned=True).why_not(work, H200) is None
    (step,) = PointwiseGemm(unaligned=True).launches(work, H200).steps
    assert isinstance(step, Launch)
    assert step.instance in UNALIGNED_INSTANCES
    for _, config in timed(product, H200, COUNTERS):
        stages = config.stages(product, H200)
        assert config.shared_bytes(product, stages) <= H200.shared_bytes_per_block


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_configurations_of_such_channels_can_be_tuned(direction: Direction) -> None:
    work = work_of(direction, batch=5, channels=(27, 162), size=28, kernel=1, pad=0)
    found = next(iter(candidates(work, H200)))
    assert {one.family.name for one in found} == {FAMILY.name}
    for one in found:
        tuned = FAMILY.tuned(one.config, work, H200)
        assert tuned is not None
        assert tuned.launches(work, H200).kernel == f"{FAMILY.name}_{direction}_{one.config}"


def test_rows_of_whole_chunks_are_not_unaligned() -> None:
    work = pointwise(4, (64, 256), 7)
    assert "of whole" in (PointwiseGemm(unaligned=True).why_not(work, H200) or "")
    assert not products_of(work, unaligned=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("size", [28, 7])
def test_planes(size: int, batch: int, direction: Direction) -> None:
    def of(layout: str = "NCHW") -> ConvWork:
        return work_of(
            direction,
            batch=batch,
            channels=(72, 1000),
            size=size,
            kernel=1,
            pad=0,
            layout=layout,
        )

    work, pixels = of(), size * size
    assert PointwiseGemm(planes=True).why_not(of("NHWC"), H200) is not None
    products = products_of(work)
    if size == 7 and direction == "fwd":
        assert not products
        assert products_of(work, unaligned=True)
        return
    for product in products:
        assert product.shifted == (size == 7)
        found = timed(product, H200, COUNTERS)
        assert found
        for _, config in found:
            stages = config.stages(product, H200)
            assert stages >= min(3, config.steps_each(product))
            assert config.shared_bytes(product, stages) <= H200.shared_bytes_per_block
            # Neither tiles nor k-tiles reach over images.
            if direction == "bwd_weight":
                assert config.steps(product) == batch * ceil_div(pixels, config.depth)
            else:
                assert not config.reduces
                tile = config.n if product.swapped else config.m
                assert config.tiles(product)[product.swapped] == batch * ceil_div(pixels, tile)
    (step,) = PointwiseGemm().launches(work, H200).steps
    assert isinstance(step, Launch)
    assert step.instance in INSTANCES


@pytest.mark.parametrize("direction", ["bwd_data", "bwd_weight"])
def test_planes_that_no_eight_channels_align(direction: Direction) -> None:
    work = work_of(direction, batch=2, channels=(68, 64), size=7, kernel=1, pad=0, layout="NCHW")
    assert products_of(work) == ()
    assert products_of(work, unaligned=True)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("batch", "channels", "size"), [(16, (800, 128), 8), (32, (24, 144), 56), (2, (192, 1280), 6)]
)
def test_tf32(
    batch: int, channels: tuple[int, int], size: int, direction: Direction, layout: str
) -> None:
    work = work_of(
        direction,
        batch=batch,
        channels=channels,
        size=size,
        kernel=1,
        pad=0,
        layout=layout,
        dtype=DType.FLOAT32,
        precision="high",
    )
    products = products_of(work)
    assert products
    for product in products:
        found = timed(product, H200, COUNTERS)
        assert found
        for _, config in found:
            stages = config.stages(product, H200)
            assert stages >= min(3, config.steps_each(product))
            assert config.shared_bytes(product, stages) <= H200.shared_bytes_per_block
            assert config.reduces or product.stores
    # Channels first, the weight of a gradient of the input is copied.
    *copies, step = FAMILY.launches(work, H200).steps
    assert len(copies) == (layout == "NCHW" and direction == "bwd_data")
    assert isinstance(step, Launch)
    assert step.overlaps == bool(copies)
    assert step.instance in INSTANCES
    # Results with an epilogue other than a bias are left to others.
    assert not products_of(replace(work, activation="relu")) or direction == "bwd_weight"


def test_long_work_may_be_left_to_others() -> None:
    work = pointwise(64, (1024, 1024), 28)
    assert "expected" in (PointwiseGemm(most_s=1e-6).why_not(work, H200) or "")
    assert PointwiseGemm().why_not(work, H200) is None
