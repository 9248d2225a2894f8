"""fprop, dgrad and wgrad of any geometry as implicit GEMMs by mma.sync (implicit_gemm.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import (
    MAX_INDEX,
    uses_3xtf32,
    why_not_few_terms,
)
from convgrad_service.backends.cuda.kernels.conv.dense_weight import least_terms
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_args import (
    MAX_PHASES,
    MAX_PLANE_TAPS,
    arguments,
    taps_follow_channels,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_model import (
    candidate_configs,
    choose_config,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import (
    CHUNK_BYTES,
    Config,
    Copies,
    Gemm,
    Tile,
    tiles_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, gather_axis
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES, MAX_PIXELS, why_not_dense
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    Prepared,
    prepare_side,
    prepare_weight,
)
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
from convgrad_service.problems.sizes import Size3

__all__ = ["ImplicitGemm", "gathering", "gemm_of"]

OPERATIONS = {"fwd": "kFprop", "bwd_data": "kDgrad", "bwd_weight": "kWgrad"}
LEAST_VECTOR = 4
VECTORS = (16, 8, 4)
"""Bytes per cp.async."""
WHOLE_CHUNKS = Copies(CHUNK_BYTES)
COPIES = {
    False: [Copies(vector) for vector in VECTORS],
    True: [
        copies
        for split in (False, True)
        for copies in (
            *(Copies(vector, split) for vector in VECTORS),
            Copies(LEAST_VECTOR, split, True),
        )
    ],
}
"""All, by whether elements are float32."""
COUNTERS = ZEROS_BYTES // 4


@dataclass(frozen=True, slots=True)
class _Operands:
    """The two inputs in the kernel's order, and how threads copy them."""

    source: Prepared
    other: Prepared
    copies: Copies


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
        terms = least_terms(work) if work.direction == "bwd_weight" else work.channels[0]
        if (reason := why_not_few_terms(work, terms)) is not None:
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
        axes = [gather_axis(gathering(work), dim) for dim in range(3)]
        operands = _operands(work, device)
        gemm = gemm_of(work, axes, operands.copies)
        if self._config is None:
            time_s, config = choose_config(gemm, work.dtype, device, COUNTERS)
        else:
            config = self._config
            time_s = expected_s(gemm, work.dtype, config, device)
        copies = (*operands.source.steps, *operands.other.steps)
        workspace = [*operands.source.workspace, *operands.other.workspace]
        partials = f"{work.prefix}implicit_gemm_partials"
        tile = config.tile
        tiles = gemm.tiles(tile)
        if config.workspace > 1:
            size = tiles * work.groups * len(gemm.phases) * config.workspace * tile.m * tile.n * 4
            workspace.append(Workspace(partials, size))
        args = arguments(work, operands.source.operand, operands.other.operand, axes, gemm, config)
        launch = Launch(
            _instance(tile, gemm, work.dtype, work.direction),
            (tiles * config.cluster, work.groups, len(gemm.phases) * config.workspace),
            (tile.threads, 1, 1),
            pack(
                args,
                source=operands.source.operand,
                other=operands.other.operand,
                result=work.result,
                accumulate=work.accumulate,
                bias=work.bias,
                partials=partials if config.workspace > 1 else None,
                counters=ZEROS if config.workspace > 1 else None,
            ),
            tile.shared_bytes(config.cluster, config.steps(gemm, work.dtype)),
            overlaps=bool(copies or work.follows) and device.capability >= OVERLAPPING,
            cluster=config.cluster,
        )
        return Fragment(
            f"{self.name}_{work.direction}_{config}",
            (*copies, launch),
            tuple(workspace),
            expected_s=time_s,
            order=f"{config.cluster}x{config.workspace}" if config.splits > 1 else "",
        )

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> ImplicitGemm | None:
        axes = [gather_axis(gathering(work), dim) for dim in range(3)]
        gemm = gemm_of(work, axes, _operands(work, device).copies)
        every = candidate_configs(gemm, work.dtype, device, COUNTERS)
        found = next((one for one in every if str(one) == config), None)
        return None if found is None else ImplicitGemm(found, self._dtypes, self._least)

    def instances(self) -> Iterable[Instance]:
        return [
            Instance.of("conv/implicit_gemm.cu", **tile.defines(dtype, operation, copies))
            for dtype in self._dtypes
            for direction, operation in OPERATIONS.items()
            for copies in COPIES[dtype is DType.FLOAT32]
            for tile in tiles_of(dtype, copies, weight=direction == "bwd_weight")
        ]


def gemm_of(work: ConvWork, axes: list[Axis], copies: Copies = WHOLE_CHUNKS) -> Gemm:
    """Return the GEMM of a convolution whose operands are copied in this way."""
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


def gathering(work: ConvWork) -> ConvWork:
    """Return the work whose gather reads the source: wgrad reads the input as fprop does."""
    return replace(work, direction="fwd") if work.direction == "bwd_weight" else work


def _operands(work: ConvWork, device: CudaDevice) -> _Operands:
    """Return the inputs, or channels-last copies of those that no vector can load."""
    split = uses_3xtf32(work)
    if reads_planes(work):
        first, second = {
            "fwd": (work.x, work.w),
            "bwd_data": (work.y, work.w),
            "bwd_weight": (work.x, work.y),
        }[work.direction]
        return _Operands(Prepared(first), Prepared(second), Copies(LEAST_VECTOR, split, True))
    vectors = []

    def ready(operand: Operand, extents: tuple[int, ...], copied: Prepared) -> Prepared:
        vector = vector_of(operand, extents)
        if vector >= LEAST_VECTOR:
            vectors.append(vector)
            return Prepared(operand)
        return copied

    def activation(operand: Operand, channels: int, size: Size3, name: str) -> Prepared:
        extents = work.batch, work.groups, channels, *size
        return ready(operand, extents, prepare_side(work, name, device))

    x = (work.x, work.in_channels, work.input, "input")
    y = (work.y, work.out_channels, work.output, "grad_output")
    if work.direction == "bwd_weight":
        source, other = activation(*x), activation(*y)
    else:
        source = activation(*(y if work.direction == "bwd_data" else x))
        extents = work.groups, work.out_channels, work.in_channels, *work.kernel
        other = ready(work.w, extents, prepare_weight(work, device))
    return _Operands(source, other, Copies(min(vectors, default=CHUNK_BYTES), split))


def reads_planes(work: ConvWork) -> bool:
    """Return whether the kernel reads the operands in place, channels first."""
    if work.dtype is not DType.FLOAT32 or max(work.kernel) > MAX_PLANE_TAPS:
        return False
    x, y = (work.x, work.in_channels, work.input), (work.y, work.out_channels, work.output)
    weight = work.direction == "bwd_weight"
    if weight and not taps_follow_channels(work):
        return False
    source = y if work.direction == "bwd_data" else x
    for operand, _, size in (x, y) if weight else (source,):
        if operand.strides[2] == 1 or (operand.strides[5] != 1 and size[2] > 1):
            return False
    operand, channels, size = source
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


def _instance(tile: Tile, gemm: Gemm, dtype: DType, direction: str) -> Instance:
    return Instance.of(
        "conv/implicit_gemm.cu", **tile.defines(dtype, OPERATIONS[direction], gemm.copies)
    )
