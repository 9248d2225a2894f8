"""Results whose channels are not whole chunks, computed with padding, emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import ImplicitGemm
from convgrad_service.backends.cuda.kernels.conv.padded_result import PaddedResult
from convgrad_service.backends.cuda.kernels.layout.transpose import RowCopy, RowPack
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Clear
from convgrad_service.plans.cuda.works import Copy, CopyAxis
from tests.emulator.backend import EmulatedBackend, Launching, filled_by, launch_of, works_here
from tests.emulator.memory import Buffers
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd, grouped_conv_bwd_weight
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS = {
    "temporal": (Conv(2, 45, 28, (4, 5, 5), (3, 1, 1), 1, (1, 0, 0)), "NDHWC"),
    "strided": (Conv(2, 21, 12, (9, 9), (3, 3), 2, 1), "NHWC"),
    "both_odd": (Conv(1, 19, 13, (7, 6), (1, 1), 1, 0), "NHWC"),
}


def without_bias(name: str, conv: Conv) -> Case:
    case = conv_fwd(name, conv)
    return replace(case, shapes={key: case.shapes[key] for key in ("input", "weight")})


CASES = [
    pytest.param(make(name, conv), layout, id=f"{name}-{make.__name__}")
    for name, (conv, layout) in LAYERS.items()
    for make in (conv_bwd_data, grouped_conv_bwd_weight, without_bias)
]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    padded = PaddedResult((ImplicitGemm(),), COPIES, least_elements=1)
    return EmulatedBackend(replace(FAMILIES, fwd=[padded], bwd_data=[padded], bwd_weight=[padded]))


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_right(emulated: EmulatedBackend, seed: int, case: Case, layout: str) -> None:
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, "bfloat16", gate)
        found = answers(emulated, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id}")
    check_rule(emulated, seed, case, "bfloat16", layout)


@pytest.mark.parametrize(("width", "pitch"), [(45, 48), (3, 8), (230, 232)])
@pytest.mark.parametrize(("itemsize", "dtype"), [(2, DType.BFLOAT16), (4, DType.FLOAT32)])
def test_rows_packed(width: int, pitch: int, itemsize: int, dtype: DType) -> None:
    """The last chunk is shorter, and rows begin inside of chunks."""
    rows = 37
    axes = CopyAxis(rows, pitch, width), CopyAxis(width, 1, 1)
    copy = Copy("source", "target", dtype, axes)
    assert RowCopy().why_not(copy, H200) is not None
    assert RowPack().why_not(copy, H200) is None
    given = np.arange(rows * pitch).astype(f"u{itemsize}").reshape(rows, pitch)
    memory = Buffers({"source": given.nbytes, "target": rows * width * itemsize}, 0xFF)
    memory.bytes["source"][...] = given.reshape(-1).view(np.uint8)
    (step,) = RowPack().launches(copy, H200).steps
    assert not isinstance(step, Clear)
    filled = filled_by(step.arguments, memory.addresses)
    wrong = launch_of(step.instance)(
        Launching(filled.ctypes.data, memory.stretches, len(memory.stretches), step.grid, 256, 0)
    )
    assert wrong is None
    assert memory.spilled() is None
    found = memory.bytes["target"].view(given.dtype).reshape(rows, width)
    assert (found == given[:, :width]).all()
