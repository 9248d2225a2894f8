"""`make compile-all` says what fails, goes on where it was, and keeps what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convgrad_service.backends.cuda import compile as cuda_compile
from convgrad_service.backends.cuda.compile import Compiler, Cubin, Resources
from convgrad_service.backends.cuda.nvrtc import CompileError
from convgrad_service.plans.cuda.program import Instance
from tests.perf import compile_kernels
from tests.perf.cleared import Cleared

COPY = ["--arch", "sm_80", "sm_120", "--match", "strided_copy", "--processes", "1"]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled; nothing really is, and results lie in a folder of the test's.

    The first is refused or spills where the list holds these words."""
    names: list[str] = []

    def compile_(self: Compiler, instance: Instance) -> Cubin:
        how = names.pop() if names and names[-1] in ("refused", "spilling") else ""
        names.append(instance.name)
        if how == "refused":
            raise CompileError("no such thing")
        return Cubin(b"", Resources(registers=40, spill_store_bytes=4 * (how == "spilling")))

    monkeypatch.setattr(cuda_compile.Compiler, "compile", compile_)
    monkeypatch.setattr(compile_kernels, "RESULTS", tmp_path / "compiled.jsonl")
    return names


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "compiled.jsonl").read_text().splitlines()]


def test_only_what_has_changed_is_compiled_again(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_kernels.main(COPY) == 0
    once = list(compiled)
    first = rows(tmp_path)
    assert [row["architecture"] for row in first] == ["sm_120", "sm_80"]
    assert sum(row["good"] for row in first) == len(once) > 2
    assert compile_kernels.main(COPY) == 0
    assert compiled == once
    # As after a change of the source.
    hashed = cuda_compile.source_hash
    monkeypatch.setattr(cuda_compile, "source_hash", lambda name: hashed(name) + "changed")
    assert compile_kernels.main(COPY) == 0
    assert len(compiled) == 2 * len(once)
    assert not {row["key"] for row in first} & {row["key"] for row in rows(tmp_path)}
    assert compile_kernels.main([*COPY, "--afresh"]) == 0
    assert len(compiled) == 3 * len(once)


@pytest.mark.parametrize("how", ["refused", "spilling"])
def test_what_is_not_good_fails_is_named_and_is_tried_again(
    how: str, compiled: list[str], tmp_path: Path
) -> None:
    compiled.append(how)
    assert compile_kernels.main(COPY) == 1
    bad, good = sorted(rows(tmp_path), key=lambda row: int(row["architecture"] == "sm_120"))
    assert bad[how] == compiled[:1]
    assert bad["good"] == bad["instances"] - 1
    assert good["good"] == good["instances"]
    assert bad["good"] == len(bad["done"])
    before = len(compiled)
    assert compile_kernels.main(COPY) == 0
    assert len(compiled) == before + 1
    assert all(row["good"] == row["instances"] and "done" not in row for row in rows(tmp_path))


def test_slices_of_a_shard_add_up(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of two instances, then the others, of two architectures."""
    once = compile_kernels.compiled

    def tired(compiler: Compiler, instance: Instance) -> compile_kernels.Line:
        if compiled:
            monkeypatch.setattr(compile_kernels.time, "monotonic", lambda: float("inf"))
        return once(compiler, instance)

    with monkeypatch.context() as slice_:
        slice_.setattr(compile_kernels, "compiled", tired)
        assert compile_kernels.main([*COPY, "--seconds", "100"]) == 0
    (row,) = rows(tmp_path)
    assert len(row["done"]) == row["good"] == len(compiled) < row["instances"]
    assert compile_kernels.main(COPY) == 0
    assert len(compiled) == len(set(compiled)) * 2 == 2 * row["instances"]
    assert all(row["good"] == row["instances"] and "done" not in row for row in rows(tmp_path))


def test_shards_are_shared_out_and_add_up(compiled: list[str], tmp_path: Path) -> None:
    arguments = ["--arch", "sm_80", "sm_90a", "--match", "transpose", "--processes", "1"]
    for shard in ("1/2", "2/2"):
        assert compile_kernels.main([*arguments, "--shard", shard]) == 0
    names = {(row["source"], row["architecture"]) for row in rows(tmp_path)}
    everything = list(compile_kernels.shards(("sm_80", "sm_90a"), "transpose"))
    assert names == {(one.source, one.architecture) for one in everything}
    assert len(compiled) == sum(len(one.instances) for one in everything)


def test_results_of_other_machines_are_merged_if_they_hold(
    compiled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    assert compile_kernels.main([*COPY, "--results", str(other)]) == 0
    gone = {"source": "gone.cu", "architecture": "sm_80", "key": "1", "good": 1, "instances": 1}
    (tmp_path / "compiled.jsonl").write_text(json.dumps(gone))
    first, second = map(json.loads, other.read_text().splitlines())
    other.write_text(f"{json.dumps(first)}\n{json.dumps(second | {'key': 'older'})}\n")
    assert compile_kernels.main(["--merge", str(other)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 2 lines hold; 1 of ")
    assert rows(tmp_path) == [first]
    assert len(compiled) == first["instances"] + second["instances"]


def test_a_run_that_is_ended_keeps_what_it_found(tmp_path: Path) -> None:
    kept = Cleared(tmp_path / "rows.jsonl", ("name",))
    kept.put([{"name": "a", "key": "1"}])
    (tmp_path / "rows.partial").write_text("half a li")
    again = Cleared(tmp_path / "rows.jsonl", ("name",))
    assert again.get({"name": "a"}, "1") == {"name": "a", "key": "1"}
    assert again.get({"name": "a"}, "2") is None
    again.put([{"name": "a", "key": "2"}])
    assert (tmp_path / "rows.jsonl").read_text() == '{"name": "a", "key": "2"}\n'


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
