"""The compile script: alone on the standard library, and clear about what it cannot do."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

from convgrad_service.backends.cpu import compile as script

SOURCE = Path(script.__file__)


def test_it_imports_the_standard_library_alone() -> None:
    names = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names <= set(sys.stdlib_module_names)


def test_what_is_up_to_date_is_not_compiled_again() -> None:
    run = runpy.run_path(str(SOURCE))
    libraries = run["compile_libraries"]()
    before = [path.stat().st_mtime_ns for path in libraries]
    assert run["compile_libraries"]() == libraries
    assert [path.stat().st_mtime_ns for path in libraries] == before


def test_an_architecture_without_kernels_is_told() -> None:
    with pytest.raises(script.CompileError, match="not for linux on sparc"):
        script.compile_libraries("sparc")


def test_an_error_in_a_source_leaves_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("int twice(int value) { return 2 * valu; }\n")
    monkeypatch.setattr(script, "SOURCES", (tmp_path,))
    monkeypatch.setattr(script, "NATIVE", tmp_path / "native")
    with pytest.raises(script.CompileError, match="valu"):
        script.compile_libraries()
    assert not list((tmp_path / "native").iterdir())
