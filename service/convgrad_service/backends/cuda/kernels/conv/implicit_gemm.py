"""fprop, dgrad and wgrad of any geometry as implicit GEMMs by mma.sync (implicit_gemm.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import (
    MAX_INDEX,
    uses_3xtf32,
    why_not_few_terms,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_args import (
    MAX_PHASES,
    MAX_PLANE_TAPS,
    arguments,
    is_linear,
    taps_follow_channels,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_model import (
    candidate_configs,
    choose_config,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import (
    ANY_PLANES,
    CHUNK_BYTES,
    FLAT_PLANES,
    Config,
    Copies,
    Gemm,
    tiles_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    MAX_PIXELS,
    is_pointwise,
    why_not_dense,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    Prepared,
    in_whole_chunks,
    prepare_side,
    prepare_weight,
)
from convgrad_service.backends.cuda.kernels.layout.planes import flat_planes
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["ImplicitGemm", "gemm_of"]

OPERATIONS = {"fwd": "kFprop", "bwd_data": "kDgrad", "bwd_weight": "kWgrad"}
LEAST_VECTOR = 4
VECTORS = (16, 8, 4)
"""Bytes per cp.async."""
COUNTERS = ZEROS_BYTES // 4


class ImplicitGemm:
    """fwd, bwd_data and bwd_weight on tensor cores, in 16-bit types, TF32 and true float32.

    Its prologue is short. It is for layers too small for large tiles, and for those that no other
    kernel takes. Channels first, it reads float32 in place.
    """

    name = "implicit_gemm"

    def __init__(
        self,
        config: Config | None = None,
        dtypes: Sequence[DType] = DTYPES,
        least_channels: int = 1,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        config
            Overrides the chosen configuration.
        dtypes
            The dtypes that it takes.
        least_channels
            The fewest channels per group on either side.
        """
        self._config, self._dtypes, self._least = config, dtypes, least_channels

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := why_not_dense(work, device)) is not None:
            return reason
        if work.dtype not in self._dtypes:
            return f"{work.dtype.value} is left to other families"
        if (reason := why_not_few_terms(work)) is not None:
            return reason
        if min(work.in_channels, work.out_channels) < self._least:
            return f"{work.in_channels} to {work.out_channels} channels would leave most of a chunk"
        if work.split_k is not None and work.split_k > 1:
            return "split_k is set by the caller"
        if work.direction == "bwd_data" and max(work.stride) > MAX_PHASES:
            return f"stride {max(work.stride)} makes more than {MAX_PHASES} phases"
        if work.batch * max(prod(work.input), prod(work.output)) > MAX_PIXELS:
            return f"the pixels are more than {MAX_PIXELS}"
        if work.taps * (max(work.in_channels, work.out_channels) + 16) > MAX_PIXELS:
            return f"the taps x channels are more than {MAX_PIXELS}"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        return _fragment(work, device, self._config)

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> ImplicitGemm | None:
        gemm = gemm_of(work)
        every = candidate_configs(gemm, work.dtype, device, COUNTERS)
        found = next((one for one in every if str(one) == config), None)
        return None if found is None else ImplicitGemm(found, self._dtypes, self._least)

    def instances(self) -> Iterable[Instance]:
        return [
            Instance.of("conv/implicit_gemm.cu", **tile.defines(dtype, operation, copies))
            for dtype in self._dtypes
            for direction, operation in OPERATIONS.items()
            for copies in _copies(dtype, direction)
            for tile in tiles_of(dtype, copies, weight=direction == "bwd_weight")
        ]


@lru_cache(maxsize=16)
def _fragment(work: ConvWork, device: CudaDevice, config: Config | None) -> Fragment:
    """Return the launches with a configuration, or the chosen one. Cached, as several choices of
    one plan compare this family."""
    source, other = _prepared(work, device)
    gemm = gemm_of(work)
    if config is None:
        time_s, config = choose_config(gemm, work.dtype, device, COUNTERS)
    else:
        time_s = expected_s(gemm, work.dtype, config, device)
    copies = (*source.steps, *other.steps)
    workspace = [*source.workspace, *other.workspace]
    partials = f"{work.prefix}implicit_gemm_partials" if config.workspace > 1 else None
    tile = config.tile
    tiles = gemm.tiles(tile)
    if partials is not None:
        size = tiles * work.groups * len(gemm.phases) * config.workspace * tile.m * tile.n * 4
        workspace.append(Workspace(partials, size))
    launch = Launch(
        Instance.of(
            "conv/implicit_gemm.cu",
            **tile.defines(work.dtype, OPERATIONS[work.direction], gemm.copies),
        ),
        (tiles * config.cluster, work.groups, len(gemm.phases) * config.workspace),
        (tile.threads, 1, 1),
        pack(
            arguments(work, source.operand, other.operand, gemm, config),
            source=source.operand,
            other=other.operand,
            result=work.result,
            accumulate=work.accumulate,
            bias=work.bias,
            partials=partials,
            counters=ZEROS if partials else None,
        ),
        tile.shared_bytes(config.cluster, config.steps(gemm, work.dtype)),
        overlaps=bool(copies or work.follows) and device.capability >= OVERLAPPING,
        cluster=config.cluster,
    )
    return Fragment(
        f"{ImplicitGemm.name}_{work.direction}_{config}",
        (*copies, launch),
        tuple(workspace),
        expected_s=time_s,
        order=f"{config.cluster}x{config.workspace}" if config.splits > 1 else "",
    )


def gemm_of(work: ConvWork) -> Gemm:
    """Return the GEMM of a convolution."""
    axes, copies = gather_axes(work), copies_of(work)
    chunk = 1 if copies.planes else CHUNK_BYTES // work.dtype.itemsize
    source, result = work.channels
    moved = work.elements * work.dtype.itemsize
    tap_channels = ceil_div(source, chunk) * chunk
    irregular = work.taps > 1 or max(work.stride) > 1
    if work.direction == "bwd_weight":
        phases = ((work.out_channels, work.pixels),)
        columns = work.taps * tap_channels
        return Gemm(phases, columns, work.groups, moved, True, irregular, copies)
    found = tuple(
        (work.batch * d.count * h.count * w.count, d.taps * h.taps * w.taps * tap_channels)
        for d in axes[0].phases
        for h in axes[1].phases
        for w in axes[2].phases
    )
    return Gemm(found, result, work.groups, moved, False, irregular, copies)


def _copies(dtype: DType, direction: str) -> Iterator[Copies]:
    """Yield all ways in which `copies_of` copies inputs."""
    wide = dtype is DType.FLOAT32
    for split in (False, True)[: 1 + wide]:
        yield from (Copies(vector, split) for vector in VECTORS)
        if wide:
            yield Copies(CHUNK_BYTES, split, FLAT_PLANES)
            yield Copies(LEAST_VECTOR, split, ANY_PLANES)
        if wide and direction != "bwd_weight":
            yield Copies(CHUNK_BYTES, split, ANY_PLANES)
    if wide and direction != "bwd_weight":
        yield Copies(CHUNK_BYTES, pointwise=True)


def copies_of(work: ConvWork) -> Copies:
    """Return how threads copy the inputs, or channels-last copies of those that no vector loads."""
    split = uses_3xtf32(work)
    if reads_planes(work):
        # Of a 1x1 weight, channels are contiguous.
        other, extents = _inputs(work)[1]
        weight = work.direction == "bwd_weight"
        chunks = work.taps == 1 and (weight or vector_of(other, extents) == CHUNK_BYTES)
        if chunks and flat_planes(work) is not None:
            return Copies(CHUNK_BYTES, split, FLAT_PLANES)
        chunks = chunks and not weight
        return Copies(CHUNK_BYTES if chunks else LEAST_VECTOR, split, ANY_PLANES)
    vectors = [vector_of(operand, extents) for operand, extents in _inputs(work)]
    vector = min((one for one in vectors if one), default=CHUNK_BYTES)
    pointwise = all(vectors) and vector == CHUNK_BYTES and not split and is_product(work)
    return Copies(vector, split, pointwise=pointwise)


def is_product(work: ConvWork) -> bool:
    """Return whether a gather is a product of matrices in float32, and the result whole chunks."""
    if work.dtype is not DType.FLOAT32 or work.direction == "bwd_weight":
        return False
    extents = (work.batch, work.groups, work.channels[1], *work.input)
    return (
        is_pointwise(work)
        and work.epilogue_free
        and in_whole_chunks(work.result, extents, 2)
        and all(is_linear(one, work.batch, work.input) for one in work.sides)
    )


def _inputs(work: ConvWork) -> Sequence[tuple[Operand, tuple[int, ...]]]:
    """Return the source and the other input of the kernel, with their extents."""
    x = work.x, (work.batch, work.groups, work.in_channels, *work.input)
    y = work.y, (work.batch, work.groups, work.out_channels, *work.output)
    w = work.w, (work.groups, work.out_channels, work.in_channels, *work.kernel)
    return {"fwd": [x, w], "bwd_data": [y, w], "bwd_weight": [x, y]}[work.direction]


def _prepared(work: ConvWork, device: CudaDevice) -> list[Prepared]:
    """Return the source and the other input, or channels-last copies."""
    names = "input" if work.direction == "bwd_weight" else "source", "grad_output"
    planes = reads_planes(work)
    found: list[Prepared] = []
    for (operand, extents), name in zip(_inputs(work), names, strict=True):
        if planes or vector_of(operand, extents):
            found.append(Prepared(operand))
        elif operand is work.w:
            found.append(prepare_weight(work, device))
        else:
            found.append(prepare_side(work, name, device))
    return found


def reads_planes(work: ConvWork) -> bool:
    """Return whether the kernel reads the operands in place, channels first."""
    if work.dtype is not DType.FLOAT32 or max(work.kernel) > MAX_PLANE_TAPS:
        return False
    if work.direction == "bwd_weight" and not taps_follow_channels(work):
        return False
    each = all(stride >= size for stride, size in zip(work.stride, work.kernel, strict=True))
    if work.direction == "bwd_data" and work.taps > 1 and each:
        # A phase has one tap, so adjacent elements of K are a row of the weight apart.
        return False
    inputs = [one for one in _inputs(work) if one[0] is not work.w]
    if any(operand.strides[2] == 1 or operand.strides[5] != 1 for operand, _ in inputs):
        return False
    operand, (_, _, channels, *size) = inputs[0]
    reach = channels * operand.strides[2] + sum(
        (extent + 2 * kernel * dilation) * stride
        for extent, kernel, dilation, stride in zip(
            size, work.kernel, work.dilation, operand.strides[3:], strict=True
        )
    )
    return reach < MAX_INDEX // DType.FLOAT32.itemsize


def vector_of(operand: Operand, extents: tuple[int, ...]) -> int:
    """Return the bytes of the largest vector of contiguous, aligned channels (axis 2), or 0."""
    size = operand.dtype.itemsize
    strides = [
        stride * size
        for axis, (stride, extent) in enumerate(zip(operand.strides, extents, strict=True))
        if axis != 2 and extent > 1
    ]
    if operand.strides[2] != 1 and extents[2] > 1:
        return 0
    fitting = (
        vector for vector in VECTORS if not any(n % vector for n in (extents[2] * size, *strides))
    )
    return next(fitting, 0)
