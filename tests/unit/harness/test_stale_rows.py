"""`make readme` refuses figures that were measured before their kernels changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convgrad_service.backends.cuda.sources import source_hash
from tests.perf import peer_times, readme_tables, stale

ROW = {
    "op": "conv_fwd",
    "layer": "one",
    "dtype": "float32",
    "layout": "NCHW",
    "git_sha": "abc",
    "sources": {"layout/strided_copy.cu": source_hash("layout/strided_copy.cu")},
}


def test_a_row_holds_while_its_kernels_sources_are_what_they_were() -> None:
    changed = {**ROW, "sources": {**ROW["sources"], "layout/transpose.cu": "0123"}}  # type: ignore[dict-item]
    gone = {**ROW, "sources": {"gone.cu": "0123"}}
    unknown = {key: value for key, value in ROW.items() if key != "sources"}
    assert stale.stale_rows([ROW]) == []
    assert stale.stale_rows([changed, gone, unknown]) == [
        "conv_fwd one float32 NCHW at abc: layout/transpose.cu changed",
        "conv_fwd one float32 NCHW at abc: gone.cu changed",
        "conv_fwd one float32 NCHW at abc: it does not say from which sources it was measured",
    ]


def test_a_row_holds_while_its_kernel_is_planned() -> None:
    row = {**ROW, "bench": "networks", "op": "conv_bwd_data", "batch": 8, "dtype": "bfloat16"}
    row |= {"layer": next(iter(stale._layers())), "layout": "NHWC", "kernel": "another"}
    (reason,) = stale.stale_rows([row])
    planned = reason.removesuffix(" is planned").rpartition(" ")[2]
    assert planned != "another"
    assert stale.stale_rows([{**row, "kernel": planned}]) == []


def test_such_rows_can_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "networks.jsonl"
    gone = {**ROW, "batch": 8, "sources": {"gone.cu": "0123"}}
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(gone)}\n")
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    assert stale.standing_keys(path, lambda row: row.get("batch")) == {None}
    assert stale.main([]) == 1
    assert stale.main(["--drop"]) == 0
    assert path.read_text() == f"{json.dumps(ROW)}\n"
    assert stale.main([]) == 0


def test_tables_of_gpu_kernels_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "README.md"
    tables = {name: lambda: "new figures" for name in ("gpu", "networks", "network_classes")}
    tables["settings"] = lambda: "new settings"
    monkeypatch.setattr(readme_tables, "TABLES", {document: tables})
    monkeypatch.setattr(peer_times, "TABLE", tmp_path / "peer_times.json")
    text = "".join(f"<!-- table: {name} -->\n{{}}\n<!-- end -->\n" for name in tables)
    document.write_text(text.format("old", "old", "old", "old"))
    gone = {**ROW, "sources": {"gone.cu": "0"}}
    rows = {bench: [ROW] for bench in readme_tables.OF_GPU} | {"networks": [ROW, gone]}
    monkeypatch.setattr(readme_tables, "records", rows.__getitem__)
    assert readme_tables.main() == 1
    assert document.read_text() == text.format("new figures", "old", "old", "new settings")
    rows["networks"] = [ROW]
    assert readme_tables.main() == 0
    assert document.read_text() == text.format(*["new figures"] * 3, "new settings")
    assert "gone.cu changed" in capsys.readouterr().err
