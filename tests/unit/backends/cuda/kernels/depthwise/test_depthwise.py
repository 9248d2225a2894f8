"""The plans of the depthwise kernels: strips, tiles, and what is left to others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import DepthwiseDirect
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_pairs import (
    PAIR_TILES,
    DepthwisePairs,
    DepthwisePairsArgs,
    place_bytes,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    STRIP_COLUMNS,
    plane_of,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight import DepthwiseWeight
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    CLUSTERS,
    MOST_CLUSTER,
    fitting_blocks,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_direct import (
    DIRECT_TILES,
    THREADS,
    VECTOR,
    DepthwiseWeightDirect,
    DirectTile,
    layouts,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import (
    TILE_STRIPS,
    DepthwiseWeightMma,
    Strips,
    chunk_rows,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_rows import (
    DepthwiseWeightRows,
)
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Fragment, Launch
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems import (
    ConvBwdData,
    ConvFwd,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS

INSTANCES = {
    instance
    for family in (
        DepthwisePairs(),
        DepthwiseDirect(),
        DepthwiseWeight(),
        DepthwiseWeightMma(),
        DepthwiseWeightRows(),
    )
    for instance in family.instances()
}
# What remains without the families of small problems.
LARGE = FAMILIES.without(("depthwise_direct", "depthwise_weight_rows"))
DIRECT = DepthwiseWeightDirect().name
OLDER = replace(H200, capability=(8, 0))


def shape(
    kernel: tuple[int, int],
    stride: int = 1,
    dilation: int = 1,
    multiplier: int = 1,
    size: tuple[int, int] = (28, 30),
    batch: int = 3,
    groups: int = 48,
) -> ConvShape:
    pads = tuple(dilation * (k - 1) // 2 for k in kernel)
    output = tuple(
        (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1
        for n, pad, k in zip(size, pads, kernel, strict=True)
    )
    return ConvShape(
        batch=batch,
        groups=groups,
        in_channels=groups,
        out_channels=groups * multiplier,
        input_size=size,
        kernel_size=kernel,
        output_size=output,
        stride=(stride, stride),
        padding=tuple((pad, pad) for pad in pads),
        dilation=(dilation, dilation),
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 15, 16, 17, 40])
@pytest.mark.parametrize("batch", [1, 2, 13, 64])
def test_a_tile_has_room_for_its_units(count: int, batch: int) -> None:
    """Brute force: every unit that a tile's strips read lies within the slots, for every tile."""
    strips = Strips(batch, count)
    assert strips.slots % 4 == 0
    assert strips.slots * STRIP_COLUMNS <= TILE_STRIPS * STRIP_COLUMNS * 2
    for tile in range(strips.tiles):
        start = tile * TILE_STRIPS
        origin = start // count * strips.units + start % count
        for strip in range(start, start + TILE_STRIPS):
            first = strip // count * strips.units + strip % count - origin
            assert first >= 0
            assert first + 2 <= strips.slots


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "multiplier"),
    [
        ((5, 5), 1, 1, 1),
        ((5, 5), 2, 1, 1),
        ((7, 7), 1, 1, 1),
        ((13, 13), 1, 1, 1),
        ((2, 4), 1, 1, 1),
        ((3, 3), 1, 2, 1),
        ((3, 3), 1, 4, 1),
        ((3, 3), 1, 1, 2),
        ((5, 5), 2, 1, 3),
    ],
)
def test_one_launch_of_a_listed_instance(
    dtype: DType, kernel: tuple[int, int], stride: int, dilation: int, multiplier: int
) -> None:
    conv, layout = shape(kernel, stride, dilation, multiplier), LAYOUTS["NHWC"]
    problems = [
        ConvFwd(conv=conv, dtype=dtype, layout=layout, bias=False),
        GroupedConvBwdWeight(
            conv=conv, dtype=dtype, layout=layout, weight_dtype=DType.FLOAT32, split_k=None
        ),
    ]
    if multiplier == 1:
        problems.append(ConvBwdData(conv=conv, dtype=dtype, layout=layout))
    for problem in problems:
        plan = plan_for(problem, H200, FAMILIES)
        (launch,) = (step for step in plan.steps if isinstance(step, Launch))
        assert launch.instance in INSTANCES, plan.kernel
        assert launch.shared_bytes <= H200.shared_bytes_per_block


@pytest.mark.parametrize("stride", [3, 4, 5, 8])
@pytest.mark.parametrize("kind", [ConvFwd, ConvBwdData])
def test_a_long_stride(kind: type[ConvFwd | ConvBwdData], stride: int) -> None:
    problem = kind(conv=shape((5, 5), stride), dtype=DType.BFLOAT16, layout=LAYOUTS["NHWC"])
    plan = plan_for(problem, H200, FAMILIES)
    assert plan.kernel.startswith(DepthwiseDirect().name)
    assert {step.instance for step in plan.steps if isinstance(step, Launch)} <= INSTANCES


@pytest.mark.parametrize(
    ("conv", "dtype", "reason"),
    [
        (shape((3, 3), 2, 2), DType.FLOAT32, "both strided and dilated"),
        (shape((5, 5), multiplier=2), DType.BFLOAT16, "sums over 2 channels"),
        (shape((3, 3)), DType.FLOAT64, "float64"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_is_left_to_others(conv: ConvShape, dtype: DType, reason: str) -> None:
    problem = ConvBwdData(conv=conv, dtype=dtype, layout=LAYOUTS["NHWC"])
    passed_over = dict(plan_for(problem, H200, FAMILIES).passed_over)
    assert passed_over[DepthwiseDirect().name] == reason


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_float32_is_copied_in_whole_chunks(dtype: DType) -> None:
    problem = GroupedConvBwdWeight(
        conv=shape((3, 3), groups=10),
        dtype=dtype,
        layout=LAYOUTS["NHWC"],
        weight_dtype=dtype,
        split_k=None,
    )
    families = replace(FAMILIES, bwd_weight=[DepthwiseWeight(always=True), DepthwiseWeightRows()])
    passed_over = dict(plan_for(problem, H200, families).passed_over)
    refused = {"depthwise_weight": "10 channels are not whole chunks"}
    assert passed_over == (refused if dtype is DType.FLOAT32 else {})


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (shape((3, 3), size=(56, 56), batch=64), None),
        (shape((3, 3), 2, size=(56, 56), batch=64), "3 columns take an instance of 5 rows"),
        (shape((5, 5), 2, size=(56, 56), batch=64), None),
        (shape((7, 7), size=(19, 19)), None),
        (shape((3, 3), dilation=2), None),
        (shape((3, 3), size=(19, 19), batch=64), "19 columns leave much of 3 strips of 8 empty"),
        (
            shape((3, 3), size=(56, 56), batch=1),
            "150528 elements; other families are faster on few",
        ),
        (shape((3, 7)), "7 columns take an instance of 7 rows"),
        (shape((7, 7), 2), "no instance for kernel (1, 7, 7) and stride (1, 2, 2)"),
        (shape((3, 3), 3), "no instance for kernel (1, 3, 3) and stride (1, 3, 3)"),
        (shape((5, 5), multiplier=2), "2 channels per group"),
    ],
)
def test_what_pairs_take(conv: ConvShape, reason: str | None) -> None:
    problem = ConvBwdData(conv=conv, dtype=DType.BFLOAT16, layout=LAYOUTS["NHWC"])
    plan, name = plan_for(problem, H200, LARGE), DepthwisePairs().name
    assert dict(plan.passed_over).get(name) == reason
    assert plan.kernel.startswith(name) == (reason is None)


def test_the_first_of_two_launches_is_not_of_pairs() -> None:
    """The second one is launched to overlap it."""
    first = shape((3, 3), size=(56, 56), batch=64)
    second = replace(
        first, groups=1, out_channels=512, kernel_size=(1, 1), padding=((0, 0), (0, 0))
    )
    problem = GroupedConvConvFwd(
        conv0=first,
        conv1=second,
        dtype=DType.BFLOAT16,
        layout=LAYOUTS["NHWC"],
        bias0=False,
        bias1=False,
        activation0="none",
        activation1="none",
        precision="highest",
    )
    plan = plan_for(problem, H200, FAMILIES)
    assert plan.kernel.startswith("depthwise_direct_fwd + ")
    reason = "the next launch would overlap it, which was not measured"
    assert (DepthwisePairs().name, reason) in plan.passed_over


@pytest.mark.parametrize(
    ("kernel", "stride"), [(3, 1), (5, 1), (7, 1), (9, 1), (13, 1), (3, 2), (5, 2)]
)
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (14, 20), (57, 130)])
@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("multiprocessors", [1, 60, 132])
def test_shares_hold_all_rows(
    kernel: int, stride: int, size: tuple[int, int], batch: int, multiprocessors: int
) -> None:
    """Brute force: a tile's strips lie in its rows of shared memory, and shares end with the last
    row."""
    device = replace(H200, multiprocessors=multiprocessors)
    problem = ConvBwdData(
        conv=shape((kernel, kernel), stride, size=size, batch=batch),
        dtype=DType.FLOAT16,
        layout=LAYOUTS["NHWC"],
    )
    for which in (1, -1):
        ordered = PAIR_TILES[::which]
        tiles = tuple({(one.kernel_rows, one.stride): one for one in ordered}.values())
        family = DepthwisePairs(tiles, anything=True)
        plan = plan_for(problem, device, replace(FAMILIES, bwd_data=[family]))
        (launch,) = (step for step in plan.steps if isinstance(step, Launch))
        assert launch.instance in INSTANCES
        args = DepthwisePairsArgs.from_buffer_copy(
            launch.arguments.fill(dict.fromkeys(launch.arguments.buffers, 0))
        )
        places = args.tiles * args.rows
        assert (launch.grid[1] - 1) * args.share < places <= launch.grid[1] * args.share
        assert args.tiles * 8 >= batch * args.strips > (args.tiles - 1) * 8
        assert args.rows * stride >= size[0]
        (tile,) = (tile for tile in tiles if launch.instance in DepthwisePairs((tile,)).instances())
        for first in range(args.strips):
            # Of the units that its strips begin with.
            last = 7 + (first + 7) // args.strips * tile.more
            pixels = (last + 1 + tile.more) * 8 // stride
            assert place_bytes(tile, pixels, stride > 1) <= args.row_bytes


@pytest.mark.parametrize(
    ("kernel", "stride", "size", "batch", "taker"),
    [
        (3, 1, 56, 128, DIRECT),
        (3, 1, 57, 160, "depthwise_weight_mma"),
        (3, 1, 28, 512, DIRECT),
        (3, 1, 14, 512, "depthwise_weight"),
        (3, 1, 19, 800, DIRECT),
        (3, 1, 56, 8, "depthwise_weight"),
        (3, 2, 112, 64, DIRECT),
        (3, 2, 150, 64, "depthwise_weight"),
        (5, 1, 28, 512, "depthwise_weight_mma"),
        (5, 1, 28, 64, "depthwise_weight"),
        (5, 2, 56, 128, "depthwise_weight"),
        (7, 1, 56, 8, "depthwise_weight"),
        (7, 1, 56, 16, "depthwise_weight"),
        (7, 1, 56, 64, "depthwise_weight_mma"),
    ],
)
def test_who_takes_the_weight(kernel: int, stride: int, size: int, batch: int, taker: str) -> None:
    problem = GroupedConvBwdWeight(
        conv=shape((kernel, kernel), stride, size=(size, size), batch=batch),
        dtype=DType.BFLOAT16,
        layout=LAYOUTS["NHWC"],
        weight_dtype=DType.BFLOAT16,
        split_k=None,
    )
    assert plan_for(problem, H200, LARGE).kernel == taker
    assert plan_for(problem, OLDER, LARGE).kernel != DIRECT


SMALL_LAYERS = [
    (3, 1, (14, 14), 480, 1),
    (3, 2, (112, 112), 64, 1),
    (5, 2, (14, 14), 672, 1),
    (7, 1, (7, 7), 768, 1),
    (3, 1, (56, 56), 36, 1),
    (5, 1, (13, 13), 45, 8),
]


@pytest.mark.parametrize(("kernel", "stride", "size", "channels", "batch"), SMALL_LAYERS)
def test_small_problems_are_computed_directly(
    kernel: int, stride: int, size: tuple[int, int], channels: int, batch: int
) -> None:
    conv = shape((kernel, kernel), stride, size=size, batch=batch, groups=channels)
    layout, dtype = LAYOUTS["NHWC"], DType.BFLOAT16
    data = ConvBwdData(conv=conv, dtype=dtype, layout=layout)
    weight = GroupedConvBwdWeight(
        conv=conv, dtype=dtype, layout=layout, weight_dtype=dtype, split_k=None
    )
    assert plan_for(data, H200, FAMILIES).kernel == "depthwise_direct_bwd_data"
    assert plan_for(weight, H200, FAMILIES).kernel == "depthwise_weight_rows"


@pytest.mark.parametrize("blocks", [1, 2, 7, 9, 12, 13, 200])
@pytest.mark.parametrize("columns", [1, 15, 21, 24, 60, 200])
def test_blocks_of_a_cluster_fit_on_the_device(blocks: int, columns: int) -> None:
    found = fitting_blocks(H200, blocks, columns, H200.multiprocessors)
    assert found in CLUSTERS or found == blocks > 12
    assert 1 <= found <= blocks + 1
    if found > 1 and found in CLUSTERS:
        assert found * columns <= H200.multiprocessors
    if 2 < found <= MOST_CLUSTER:
        # A cluster lies among 16 of 17 SMs: of five blocks, 23 run at once.
        assert columns <= H200.multiprocessors / 17 * (16 // found)
    assert fitting_blocks(OLDER, blocks, columns, H200.multiprocessors) == blocks


@pytest.mark.parametrize(
    ("tile", "channels", "size", "batch"),
    [
        (tile, *layer)
        for tile in DIRECT_TILES
        for layer in (
            (8, (9, 5), 1),
            (8, (9, 8), 1),
            (144, (56, 56), 64),
            (1000, (7, 300), 2),
            (1000, (7, 304), 2),
        )
        if tile.ragged or layer[1][1] % 8 == 0
    ],
)
def test_a_direct_layout_covers_everything(
    tile: DirectTile, channels: int, size: tuple[int, int], batch: int
) -> None:
    conv = shape((3, 3), tile.stride, size=size, batch=batch, groups=channels)
    problem = GroupedConvBwdWeight(
        conv=conv,
        dtype=DType.BFLOAT16,
        layout=LAYOUTS["NHWC"],
        weight_dtype=DType.BFLOAT16,
        split_k=None,
    )
    seen: list[ConvWork] = []

    class Asked(DepthwiseWeightDirect):
        def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
            seen.append(work)
            return super().launches(work, device)

    families = replace(FAMILIES, bwd_weight=[Asked(always=True)])
    (launch,) = plan_for(problem, H200, families).steps
    assert isinstance(launch, Launch)
    assert launch.block[0] <= THREADS
    plane = plane_of(seen[0])
    assert not isinstance(plane, str)
    for cost, layout in layouts(seen[0], plane, tile, H200):
        assert cost > 0
        assert layout.units * layout.unit_warps * 32 <= THREADS
        assert layout.unit_warps * 32 >= layout.vectors * layout.strips
        assert layout.vectors * VECTOR % 4 == 0
        assert 1 <= layout.rows <= plane.output[0]


@pytest.mark.parametrize("rows", [1, 2, 7, 56, 1000])
@pytest.mark.parametrize("items", [1, 100, 10_000])
def test_chunks_are_some_of_the_rows(rows: int, items: int) -> None:
    assert 1 <= chunk_rows(rows, 6, items, 264) <= rows
