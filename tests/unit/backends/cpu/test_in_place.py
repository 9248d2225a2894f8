"""Kernels read and write tensors in place: to their last element and not beyond."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import problem_from

Array = NDArray[Any]
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def before_a_guard(array: Array) -> Iterator[Array]:
    """Yield a copy that ends where a page begins that nobody may read."""
    pages = -(-array.nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    held = ctypes.c_char.from_buffer(memory)
    guard = ctypes.c_void_p(ctypes.addressof(held) + pages * PAGE)
    assert LIBC.mprotect(guard, PAGE, 0) == 0
    start = pages * PAGE - array.nbytes
    copy = np.frombuffer(memory, array.dtype, array.size, start).reshape(array.shape)
    copy[...] = array
    try:
        yield copy
    finally:
        assert LIBC.mprotect(guard, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("channels", [(24, 40), (17, 3), (16, 48), (3, 24), (1, 33)])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (1, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_nothing_is_accessed_beyond_a_tensor(
    channels: tuple[int, int], kernel: int, stride: int, layout: str
) -> None:
    in_channels, out_channels = channels
    rng = np.random.default_rng(0)
    pad = kernel // 2 if stride == 1 else 0
    out = (10 + 2 * pad - kernel) // stride + 1

    def drawn(batch: int, channels: int, size: int) -> Array:
        shape = (batch, size, size, channels) if layout == "NHWC" else (batch, channels, size, size)
        return rng.standard_normal(shape, np.float32)

    x, y = drawn(2, in_channels, 10), drawn(2, out_channels, out)
    w = drawn(out_channels, in_channels, kernel)
    params = {"stride": stride, "padding": pad, "layout": layout}
    backend = CpuBackend(threads=1)

    def run(operation: str, tensors: dict[str, Array], **more: Any) -> Array:
        request = validate(OPERATIONS[operation].request, {**tensors, **params, **more})
        problem = problem_from(operation, request)
        (name,) = problem.outputs
        blank = np.empty(problem.outputs[name].shape, np.float32)
        with before_a_guard(blank) as guarded:
            backend.run(problem, tensors, out={name: guarded})
            return guarded.copy()

    with before_a_guard(x) as guarded_x, before_a_guard(y) as guarded_y:
        for operation, plain, guarded, more in (
            ("conv_fwd", {"input": x, "weight": w}, {"input": guarded_x, "weight": w}, {}),
            (
                "conv_bwd_data",
                {"grad_output": y, "weight": w},
                {"grad_output": guarded_y, "weight": w},
                {"input_size": (10, 10)},
            ),
            (
                "grouped_conv_bwd_weight",
                {"input": x, "grad_output": y},
                {"input": guarded_x, "grad_output": guarded_y},
                {"weight_size": (kernel, kernel)},
            ),
        ):
            expected = run(operation, plain, **more)
            np.testing.assert_array_equal(run(operation, guarded, **more), expected)
