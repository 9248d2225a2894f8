"""Arguments of kernels, read from the C++ that declares them: as the compiler lays them out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convgrad_service.backends.cuda import sources
from convgrad_service.backends.cuda.structures import MapField, structure
from convgrad_service.plans.cuda.program import Instance
from tests.emulator.backend import launch_of, works_here

# Nested structures, arrays of them, constants, bytes; tensor maps in arrays and behind a base;
# a template's argument that is a base.
HEADERS: list[tuple[str, str, dict[str, int]]] = [
    ("conv/implicit_gemm_args.cuh", "ImplicitGemmArgs", {}),
    ("conv/hopper_halo_args.cuh", "HopperHaloArgs", {}),
    ("conv/hopper_gather.cuh", "HopperGatherArgs", {"MAPS": 8}),
    ("conv/hopper_first_data.cuh", "HopperFirstDataArgs", {}),
    ("conv/first_windows.cuh", "WindowArgs", {}),
]


# What headers that are parts of a kernel ask for.
DEFINES = {
    "ELEMENT": "bf16",
    "BM": "128",
    "BN": "128",
    "STAGES": "4",
    "SPLIT": "0",
    "ROWS": "3",
    "EIGHTS": "1",
    "TAPS": "3",
    "STEPS": "1",
    "WARPGROUPS": "1",
}
PROBE = """
struct ProbeArgs {
  int none;
};
extern "C" __global__ void probe(const __grid_constant__ ProbeArgs args) {}
"""


def offsets(kind: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Of every field, those of its structures too."""
    for name, of, *_ in kind._fields_:
        if of is not MapField and not name.startswith("_"):
            yield prefix + name, getattr(kind, name).offset
            if isinstance(of, type) and issubclass(of, ctypes.Structure):
                base = getattr(kind, name).offset
                yield from ((one, base + at) for one, at in offsets(of, f"{prefix}{name}."))


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize(("header", "name", "constants"), HEADERS)
def test_fields_lie_where_a_compiler_puts_them(
    tmp_path: Path, header: str, name: str, constants: dict[str, int]
) -> None:
    kind = structure(header, name, **constants)
    checks = [
        f'static_assert(__builtin_offsetof(convgrad::{name}, {field}) == {at}, "{field}");'
        for field, at in offsets(kind)
    ]
    assert len(checks) > 10
    source = tmp_path / "probe.cu"
    source.write_text("\n".join([f'#include "{header}"', *checks, PROBE]))
    defines = DEFINES | {key: str(value) for key, value in constants.items()}
    launch_of(Instance(str(source), "probe", tuple(defines.items())))


def test_what_stands_in_a_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner.cuh").write_text(
        "constexpr int kFew = 2, kMost = kFew;\n"
        "struct Pair {\n  int first, second;  // of both; both\n};\n"
        "template <class Maps>\nstruct Base : Maps {\n  float alpha;\n};\n"
    )
    (tmp_path / "one.cu").write_text(
        '#include "inner.cuh"\n'
        "struct Maps {\n  TensorMap map[kMost];\n};\n"
        "struct OneArgs : Base<Maps> {\n"
        "  const void* from;  /* a; b */\n  unsigned char small[3];\n  Pair pairs[kMost][N];\n};\n"
        "struct OddArgs {\n  Unknown what;\n};\n"
    )
    monkeypatch.setattr(sources, "KERNELS", tmp_path)
    kind = structure("one.cu", "OneArgs", N=3)
    names = [name for name, *_ in kind._fields_]
    assert names == ["map0", "map1", "alpha", "from", "small", "pairs"]
    assert kind.alpha.offset == 256
    assert ctypes.sizeof(kind) == 256 + 8 + 8 + 4 + 2 * 3 * 8 + 4
    one = kind()
    one.pairs[1][2] = (4, 5)
    assert one.pairs[1][2].second == 5
    with pytest.raises(LookupError, match="Unknown"):
        structure("one.cu", "OddArgs")
    with pytest.raises(LookupError, match="no constant N"):
        structure("one.cu", "OneArgs")


def test_fields_of_an_anonymous_structure_are_the_wholes_own() -> None:
    kind = structure(
        "conv/hopper_weight.cu", "HopperWeightArgs", anonymous=("result", "source"), PARTS=1
    )
    assert (
        kind.pad.offset
        == kind.source.offset + structure("conv/hopper_weight.cuh", "WeightSource").pad.offset
    )
