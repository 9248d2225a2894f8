"""A hook of MkDocs: lists the families of GPU kernels in kernels.md, from their modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "service/convgrad_service/backends/cuda/kernels"
MARK = "<!-- kernel families -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the table where its mark stands."""
    return markdown.replace(MARK, _table()) if page.file.src_uri == "kernels.md" else markdown


def _table() -> str:
    rows = ["| family | computes |", "| --- | --- |"]
    for source in sorted(KERNELS.rglob("*.cu"), key=lambda path: path.stem):
        module = source.with_suffix(".py")
        if module.exists():
            text = ast.get_docstring(ast.parse(module.read_text())) or ""
            said = re.split(r":?\s``\w+\.cu``|\n\n|(?<=\.)\s", text)[0].replace("\n", " ")
            rows.append(f"| `{source.stem}` | {said.rstrip('.:')} |")
    return "\n".join(rows)
