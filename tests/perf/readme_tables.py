"""Writes the tables of documents from the stored results and the settings (`make readme`).

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test asks that the
documents are what this script would write, so a figure there always has a record behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from convgrad_service.server.settings import markdown_table
from tests.perf import load_tables, speed_tables

ROOT = Path(__file__).resolve().parents[2]
README, SPEED = ROOT / "README.md", ROOT / "docs" / "speed.md"
LOAD, DEPLOY = ROOT / "docs" / "load.md", ROOT / "deploy" / "README.md"

TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    README: {
        "gpu_ratios": speed_tables.gpu_ratios_table,
        "serve_short": speed_tables.serve_short_table,
        "cpu_means": speed_tables.cpu_means_table,
        "settings": markdown_table,
    },
    SPEED: {
        "gpu": speed_tables.gpu_table,
        "cpu": speed_tables.cpu_table,
        "serve": speed_tables.serve_table,
        "wire": speed_tables.wire_table,
        "engine_gpu": speed_tables.engine_gpu_table,
        "devices": speed_tables.devices_table,
    },
    DEPLOY: {"how_far": load_tables.how_far_table},
    LOAD: {
        "load": load_tables.load_table,
        "ramp": load_tables.ramp_table,
        "soak": load_tables.soak_table,
        "ray": load_tables.ray_table,
        "ray_scaling": load_tables.ray_scaling_table,
        "ray_costs": load_tables.ray_costs_table,
    },
}


def rendered(document: Path) -> str:
    """The document's text with every table made afresh."""
    text = document.read_text(encoding="utf-8")
    for name, table in TABLES[document].items():
        before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        if mark:
            _, end, after = rest.partition("<!-- end -->")
            text = f"{before}{mark}{table().strip()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for document in TABLES:
        document.write_text(rendered(document), encoding="utf-8")
