"""A convolution as an implicit GEMM by mma.sync: fprop, dgrad and wgrad, any geometry, any sm_80+."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.channels_last import (
    Prepared,
    in_whole_chunks,
    prepare_activation,
    prepare_weight,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import (
    TILES,
    Config,
    Gemm,
    Tile,
    configs,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.dense_axes import Axis, Phase, axis_of, divider
from convgrad_service.backends.cuda.kernels.dense_limits import (
    MAX_PIXELS,
    why_not_dense,
)
from convgrad_service.backends.cuda.kernels.elements import ACTIVATIONS
from convgrad_service.plans.cuda_device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda_program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["ImplicitGemm"]

MAX_PHASES = 8
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
OPERATIONS = {"fwd": "kFprop", "bwd_data": "kDgrad", "bwd_weight": "kWgrad"}
CHUNK_BYTES, LEAST_VECTOR = 16, 4
VECTORS = (16, 8, 4)
"""Bytes that one copy may bring."""
COUNTERS = ZEROS_BYTES // 4
# Copies of operands into the order that the kernel reads: a launch, and bytes both ways.
COPY_S, COPY_BYTES_S = 2.5e-6, 3e12


class DividerArgs(ctypes.Structure):
    """See ``divider.cuh``."""

    _fields_ = (("factor", ctypes.c_uint32), ("shift", ctypes.c_int32))


class PhaseArgs(ctypes.Structure):
    """See ``implicit_gemm_args.cuh``."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("taps", "r0", "x0", "y0", "count")),
        ("by_taps", DividerArgs),
        ("by_count", DividerArgs),
    )


class AxisArgs(ctypes.Structure):
    """See ``implicit_gemm_args.cuh``."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("size", "x_step", "x_tap", "y_step", "r_step", "phases")
    )


class ImplicitGemmArgs(ctypes.Structure):
    """See ``implicit_gemm_args.cuh``."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "source",
                "other",
                "result",
                "accumulate",
                "bias",
                "partials",
                "counters",
            )
        ),
        *((f"{name}_stride", ctypes.c_int64 * 6) for name in ("source", "other", "result")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "rows",
                "columns",
                "source_channels",
                "result_channels",
                "tap_chunks",
                "cluster_log",
                "workspace",
                "ring_bytes",
                "linear_source",
                "linear_other",
                "linear_result",
                "plain",
                "result_in_vectors",
                "pixels_fastest",
                "wide_result",
                "batch",
                "activation",
            )
        ),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        *((name, DividerArgs) for name in ("by_column_tiles", "by_tap_chunks", "by_splits")),
        ("axis", AxisArgs * 3),
        ("phase", (PhaseArgs * 3) * MAX_PHASES),
    )


@dataclass(frozen=True, slots=True)
class _Operands:
    """What is read, in the order that the kernel wants, and the bytes that one copy may bring."""

    source: Prepared
    other: Prepared
    vector: int


class ImplicitGemm:
    """fwd, bwd_data and bwd_weight on tensor cores, 16 bits or TF32, with little to do before the
    first products: for layers that leave large tiles idle, and for those that no other kernel takes.
    """

    name = "implicit_gemm"

    def __init__(self, config: Config | None = None) -> None:
        """``config`` where another than the chosen one is tried."""
        self._config = config

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if (reason := why_not_dense(work, device)) is not None:
            return reason
        if work.dtype is DType.FLOAT32 and work.precision != "high":
            return "float32's own precision is not TF32's"
        result = _result(work)
        if work.accumulate is not None and work.accumulate.strides != result.strides:
            return "accumulate does not lie as the result does"
        if work.split_k is not None and work.split_k > 1:
            return "a number of splits was asked for"
        if work.direction == "bwd_data" and max(work.stride) > MAX_PHASES:
            return f"stride {max(work.stride)} makes more than {MAX_PHASES} phases"
        if work.batch * max(prod(work.input), prod(work.output)) > MAX_PIXELS:
            return f"the pixels are more than {MAX_PIXELS}"
        if work.taps * (max(work.in_channels, work.out_channels) + 16) > MAX_PIXELS:
            return f"the taps x channels are more than {MAX_PIXELS}"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        axes = [axis_of(_gathering(work), dim) for dim in range(3)]
        operands = _operands(work, device)
        gemm = gemm_of(work, axes)
        config = self._config or chosen(gemm, work, device)
        copies = (*operands.source.steps, *operands.other.steps)
        workspace = [*operands.source.workspace, *operands.other.workspace]
        partials = f"{work.prefix}implicit_gemm_partials"
        tile = config.tile
        tiles = gemm.tiles(tile)
        if config.workspace > 1:
            size = tiles * work.groups * len(gemm.phases) * config.workspace * tile.m * tile.n * 4
            workspace.append(Workspace(partials, size))
        args = _arguments(work, operands, axes, gemm, config)
        launch = Launch(
            _instance(tile, work.dtype, work.direction, operands.vector),
            (tiles * config.cluster, work.groups, len(gemm.phases) * config.workspace),
            (tile.threads, 1, 1),
            pack(
                args,
                source=operands.source.operand,
                other=operands.other.operand,
                result=_result(work),
                accumulate=work.accumulate,
                bias=work.bias,
                partials=partials if config.workspace > 1 else None,
                counters=ZEROS if config.workspace > 1 else None,
            ),
            tile.shared_bytes(config.cluster, config.steps(gemm, work.dtype)),
            overlaps=bool(copies or work.follows) and device.capability >= OVERLAPPING,
            cluster=config.cluster,
        )
        copied = sum(item.size_bytes for item in workspace if item.name != partials)
        copies_s = len(copies) * COPY_S + 2 * copied / COPY_BYTES_S
        return Fragment(
            f"{self.name}_{work.direction}_{config}",
            (*copies, launch),
            tuple(workspace),
            expected_s=expected_s(gemm, work.dtype, config, device) + copies_s,
            order=f"{config.cluster}x{config.workspace}" if config.splits > 1 else "",
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(tile, dtype, direction, vector)
            for dtype in DTYPES
            for direction in OPERATIONS
            for tile in TILES
            for vector in VECTORS
        ]


def chosen(gemm: Gemm, work: ConvWork, device: CudaDevice) -> Config:
    """What should take the least time, from the problem and the device model alone."""
    return min(
        configs(gemm, work.dtype, TILES, device, COUNTERS),
        key=lambda config: expected_s(gemm, work.dtype, config, device),
    )


def gemm_of(work: ConvWork, axes: list[Axis]) -> Gemm:
    """The convolution's M, N and K."""
    chunk = CHUNK_BYTES // work.dtype.itemsize
    source, result = _channels(work)
    size = work.dtype.itemsize
    moved = (
        size
        * work.groups
        * (
            work.batch
            * (work.in_channels * prod(work.input) + work.out_channels * prod(work.output))
            + work.taps * work.in_channels * work.out_channels
        )
    )
    tap_channels = ceil_div(source, chunk) * chunk
    if work.direction == "bwd_weight":
        phases = ((work.out_channels, work.pixels),)
        return Gemm(phases, work.taps * tap_channels, work.groups, moved)
    found = tuple(
        (work.batch * d.count * h.count * w.count, d.taps * h.taps * w.taps * tap_channels)
        for d in axes[0].phases
        for h in axes[1].phases
        for w in axes[2].phases
    )
    return Gemm(found, result, work.groups, moved)


def _gathering(work: ConvWork) -> ConvWork:
    """wgrad meets the input as fprop does."""
    return replace(work, direction="fwd") if work.direction == "bwd_weight" else work


def _result(work: ConvWork) -> Operand:
    return {"fwd": work.y, "bwd_data": work.x, "bwd_weight": work.w}[work.direction]


def _channels(work: ConvWork) -> tuple[int, int]:
    """Of the source and of the result (wgrad: of grad_output), in one group."""
    channels = work.in_channels, work.out_channels
    return channels[::-1] if work.direction == "bwd_data" else channels


def _operands(work: ConvWork, device: CudaDevice) -> _Operands:
    """The inputs as they lie, where channels are side by side in vectors, or copies of them."""
    vectors = []

    def ready(operand: Operand, extents: tuple[int, ...], copied: Prepared) -> Prepared:
        vector = vector_of(operand, extents)
        if vector >= LEAST_VECTOR:
            vectors.append(vector)
            return Prepared(operand)
        return copied

    def activation(
        operand: Operand, channels: int, size: tuple[int, int, int], name: str
    ) -> Prepared:
        extents = work.batch, work.groups, channels, *size
        name = f"{work.prefix}{name}_channels_last"
        copied = prepare_activation(operand, work.batch, work.groups, channels, size, name, device)
        return ready(operand, extents, copied)

    x = (work.x, work.in_channels, work.input, "input")
    y = (work.y, work.out_channels, work.output, "grad_output")
    if work.direction == "bwd_weight":
        source, other = activation(*x), activation(*y)
    else:
        source = activation(*(y if work.direction == "bwd_data" else x))
        extents = work.groups, work.out_channels, work.in_channels, *work.kernel
        name = f"{work.prefix}weight_channels_last"
        other = ready(
            work.w,
            extents,
            prepare_weight(
                work.w, work.groups, work.out_channels, work.in_channels, work.kernel, name, device
            ),
        )
    return _Operands(source, other, min(vectors, default=CHUNK_BYTES))


def vector_of(operand: Operand, extents: tuple[int, ...]) -> int:
    """The largest vector, in bytes, in which channels (axis 2) are side by side and aligned; 0 where
    not even two elements are."""
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


def _linear(operand: Operand, batch: int, size: tuple[int, int, int]) -> bool:
    """Whether pixel p lies at p times the stride of W."""
    wanted = operand.strides[5]
    for axis, extent in ((5, size[2]), (4, size[1]), (3, size[0]), (0, batch)):
        if extent > 1 and operand.strides[axis] != wanted:
            return False
        wanted *= extent
    return True


def _arguments(
    work: ConvWork, operands: _Operands, axes: list[Axis], gemm: Gemm, config: Config
) -> ImplicitGemmArgs:
    source_channels, result_channels = _channels(work)
    source, other, result = operands.source.operand, operands.other.operand, _result(work)
    weight, size = work.direction == "bwd_weight", work.dtype.itemsize
    written = work.input if work.direction == "bwd_data" else work.output
    one_tap = all(
        len(axis.phases) == 1
        and axis.phases[0] == Phase(1, 0, 0, 0, axis.x_size)
        and axis.x_step == 1
        for axis in axes
    )
    args = ImplicitGemmArgs()
    args.source_stride[:] = [stride * size for stride in source.strides]
    strides = [stride * size for stride in other.strides]
    if work.direction == "bwd_data":
        strides[1:3] = strides[2:0:-1]
    args.other_stride[:] = strides
    args.result_stride[:] = result.strides
    args.rows, args.columns = gemm.rows, gemm.columns
    args.source_channels, args.result_channels = source_channels, result_channels
    args.tap_chunks = ceil_div(source_channels * size, CHUNK_BYTES)
    args.cluster_log = config.cluster.bit_length() - 1
    args.workspace = config.workspace
    args.ring_bytes = config.tile.ring_bytes(config.steps(gemm, work.dtype))
    args.linear_source = one_tap and _linear(source, work.batch, written)
    args.linear_other = weight and _linear(other, work.batch, work.output)
    args.linear_result = (
        not weight and len(gemm.phases) == 1 and _linear(result, work.batch, written)
    )
    args.plain = work.epilogue_free
    extents = (
        (work.groups, work.out_channels, work.in_channels, *work.kernel)
        if weight
        else (work.batch, work.groups, result_channels, *written)
    )
    args.result_in_vectors = in_whole_chunks(result, extents, 2)
    args.pixels_fastest = not weight and result.strides[2] != 1
    args.wide_result = work.result_dtype is DType.FLOAT32
    args.batch = work.batch
    args.activation = ACTIVATIONS[work.activation]
    args.alpha, args.beta = work.alpha, work.beta
    args.by_column_tiles = DividerArgs(*divider(ceil_div(gemm.columns, config.tile.n)))
    args.by_tap_chunks = DividerArgs(*divider(args.tap_chunks))
    args.by_splits = DividerArgs(*divider(config.splits))
    for dim, axis in enumerate(axes):
        args.axis[dim] = AxisArgs(
            axis.x_size, axis.x_step, axis.x_tap, axis.y_step, axis.r_step, len(axis.phases)
        )
        for place, phase in enumerate(axis.phases):
            args.phase[place][dim] = PhaseArgs(
                phase.taps,
                phase.r0,
                phase.x0,
                phase.y0,
                phase.count,
                DividerArgs(*divider(max(phase.taps, 1))),
                DividerArgs(*divider(phase.count)),
            )
    return args


def _instance(tile: Tile, dtype: DType, direction: str, vector: int) -> Instance:
    defines = tile.defines(dtype, OPERATIONS[direction], vector)
    return Instance(
        "conv/implicit_gemm.cu",
        "implicit_gemm",
        tuple((name, str(value)) for name, value in defines.items()),
    )
