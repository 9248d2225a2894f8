"""Max pooling's gradient from its input: cubic windows of stride 1, channels last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.kernels.pool.pool_strips import DTYPES, in_words, per_word
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import (
    CudaDevice,
    architectures_before,
    with_shared_bytes,
)
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import PoolWork

__all__ = ["PoolStacks", "Stack"]

KERNEL, PAD = 3, 1
LANES = 32
MOST_PLANES = 8


@dataclass(frozen=True, slots=True)
class Stack:
    """Rows that a thread owns, and blocks per multiprocessor."""

    rows: int = 7
    blocks: int = 1

    def shared_bytes(self, warps: int) -> int:
        windows = self.rows + KERNEL - 1
        return 2 * (warps + 2 * (KERNEL - 1)) * windows * LANES * 8


# Devices before this capability compare the halves of a word separately: more registers.
IN_PAIRS = (9, 0)
STACK, OLDER_STACK = Stack(), Stack(rows=4)


StackArgs = structure("pool/pool_stacks.cu", "StackArgs")


class PoolStacks:
    """bwd from the input, channels last, windows of 3x3x3, stride 1 and padding 1."""

    name = "pool_stacks"

    def __init__(self, stack: Stack = STACK, older: Stack = OLDER_STACK) -> None:
        """Other stacks are for tuning."""
        self._newer, self._older = stack, older

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.source is None:
            return "the indices are given"
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        asked = work.kernel, work.stride, work.pad, work.dilation, work.output
        ours = (KERNEL,) * 3, (1,) * 3, (PAD,) * 3, (1,) * 3, work.input
        if asked != ours:
            return (
                f"no instance for kernel {work.kernel}, stride {work.stride}, padding {work.pad} "
                f"and dilation {work.dilation}"
            )
        if not all(in_words(work, operand) for operand in (work.source, work.x, work.y)):
            return "the channels are not contiguous whole words"
        if work.channels < LANES * per_word(work.dtype) // 2:
            return f"{work.channels} channels fill less than half of a warp"
        if image_elements(work) * work.dtype.itemsize >= 2**31:
            return "an image of more than 2^31 bytes"
        reason = device.why_not_shared(self._stack(device).shared_bytes(MOST_PLANES))
        if reason is not None:
            return reason
        if self._blocks(work, device) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        if work.source is None:
            raise ValueError("a pooling's gradient without its input")
        stack = self._stack(device)
        args = StackArgs()
        fill_strides(args, work, 3)
        args.words, args.groups = work.channels // per_word(work.dtype), _groups(work)
        args.size[:] = work.input
        args.planes, args.halo = _planes(work)
        args.stacks = ceil_div(work.input[0], args.planes)
        args.tiles = ceil_div(work.input[1], stack.rows)
        args.strip = self._strip(work, device)
        args.strips = ceil_div(work.input[2], args.strip)
        warps = args.planes + 2 * args.halo
        launch = Launch(
            _instance(work.dtype, stack, device.capability < IN_PAIRS),
            (self._blocks(work, device), 1, 1),
            (LANES * warps, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
            stack.shared_bytes(warps),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, stack, older)
            for dtype in DTYPES
            for stack, older in ((self._newer, False), (self._older, True))
        ]

    def _stack(self, device: CudaDevice) -> Stack:
        return self._older if device.capability < IN_PAIRS else self._newer

    def _lines(self, work: PoolWork, device: CudaDevice) -> int:
        """Return the blocks of one strip."""
        stacks = ceil_div(work.input[0], _planes(work)[0])
        tiles = ceil_div(work.input[1], self._stack(device).rows)
        return work.batch * stacks * _groups(work) * tiles

    def _blocks(self, work: PoolWork, device: CudaDevice) -> int:
        return self._lines(work, device) * ceil_div(work.input[2], self._strip(work, device))

    def _strip(self, work: PoolWork, device: CudaDevice) -> int:
        """Return the columns of a strip.

        Few fill the last wave of blocks; many share fewer columns with the next strip.
        """
        together = device.multiprocessors * self._stack(device).blocks
        lines, width = self._lines(work, device), work.input[2]

        def expected(strips: int) -> float:
            columns = ceil_div(width, strips)
            waves = ceil_div(lines * ceil_div(width, columns), together)
            # Columns that two strips read, and a strip's fixed cost, in columns.
            return waves * (columns + 2 * (KERNEL - 1) + 2)

        return ceil_div(width, min(range(1, max(1, width // 4) + 1), key=expected))


def _groups(work: PoolWork) -> int:
    return ceil_div(work.channels // per_word(work.dtype), LANES)


def _planes(work: PoolWork) -> tuple[int, int]:
    """That a block owns, and of halo on each side: none where all planes fit."""
    if work.input[0] <= MOST_PLANES:
        return work.input[0], 0
    return MOST_PLANES - 2 * (KERNEL - 1), KERNEL - 1


def _instance(dtype: DType, stack: Stack, older: bool) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "ROWS": stack.rows,
        "MOST_PLANES": MOST_PLANES,
        "BLOCKS": stack.blocks,
    }
    before = architectures_before(IN_PAIRS)
    fitting = with_shared_bytes(stack.shared_bytes(MOST_PLANES))
    architectures = tuple(name for name in fitting if (name in before) == older)
    return Instance.of("pool/pool_stacks.cu", defines, architectures)
