"""`make compile-all` says what fails, goes on where it was, and stores a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convgrad_service.backends.cuda import compile as cuda_compile
from convgrad_service.backends.cuda.compile import Compiler, Cubin, Resources
from convgrad_service.backends.cuda.nvrtc import CompileError
from convgrad_service.plans.cuda_program import Instance
from tests.perf import compile_kernels

COPY = ["--arch", "sm_80", "--match", "strided_copy", "--jobs", "1"]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled; nothing really is, and files lie in a folder of the test's."""
    names: list[str] = []

    def compile_(self: Compiler, instance: Instance) -> Cubin:
        names.append(instance.name)
        return Cubin(b"", Resources(registers=40 + len(names)))

    monkeypatch.setattr(cuda_compile.Compiler, "compile", compile_)
    monkeypatch.setattr(compile_kernels, "KEPT", tmp_path / "build" / "kept.jsonl")
    monkeypatch.setattr(compile_kernels, "RESULTS", tmp_path / "compiled.jsonl")
    return names


def test_a_second_run_compiles_only_what_is_new(compiled: list[str], tmp_path: Path) -> None:
    assert compile_kernels.main(COPY) == 0
    first = list(compiled)
    assert first
    # As a run leaves it that was ended while it wrote.
    kept = tmp_path / "build" / "kept.jsonl"
    kept.write_text(kept.read_text()[:-20])
    assert compile_kernels.main(COPY) == 0
    assert compiled == [*first, first[-1]]
    assert compile_kernels.main([*COPY, "--afresh"]) == 0
    assert compiled == [*first, first[-1], *first]


def test_a_line_is_stored_with_what_spills_and_what_is_refused(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(self: Compiler, instance: Instance) -> Cubin:
        compiled.append(instance.name)
        if len(compiled) == 1:
            return Cubin(b"", Resources(registers=255, stack_bytes=8, spill_store_bytes=4))
        if len(compiled) == 2:
            raise CompileError("no such thing")
        return Cubin(b"", Resources(registers=32))

    monkeypatch.setattr(cuda_compile.Compiler, "compile", compile_)
    assert compile_kernels.main([*COPY, "--store"]) == 1
    (record,) = map(json.loads, (tmp_path / "compiled.jsonl").read_text().splitlines())
    found = record["architectures"]["sm_80"]
    assert found["instances"] == len(compiled) > 2
    assert found["good"] == found["instances"] - 2
    assert found["spilling"] == compiled[:1]
    assert found["refused"] == compiled[1:2]
    assert found["most_registers"] == 255
    assert found["with_a_stack"] == 1
    assert record["versions"]["nvrtc"].count(".") == 1
    # What was refused is not kept: it is compiled again.
    assert compile_kernels.main(COPY) == 1
    assert compiled[-1] == compiled[1]


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere() -> None:
        raise CompileError("there is no NVRTC here")

    monkeypatch.setattr(compile_kernels, "find_nvrtc", nowhere)
    with pytest.raises(SystemExit) as ended:
        compile_kernels.main(COPY)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "there is no NVRTC here\n"
