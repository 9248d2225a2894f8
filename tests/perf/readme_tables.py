"""Writes the tables of documents from the stored results and the settings (`make readme`).

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test asks that the
documents are what this script would write, so a figure there always has a record behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from convgrad.errors import CODES, ServiceError
from convgrad_service.server.command import markdown_table
from tests.perf import family_tables, load_tables, network_tables, peer_times, speed_tables
from tests.perf.image_size import image_table
from tests.perf.records import records
from tests.perf.stale import stale_rows

ROOT = Path(__file__).resolve().parents[2]
README, SPEED = ROOT / "README.md", ROOT / "docs" / "speed.md"
KERNELS, ARCHITECTURE = ROOT / "docs" / "kernels.md", ROOT / "docs" / "architecture.md"
LOAD, DEPLOY = ROOT / "docs" / "load.md", ROOT / "deploy" / "README.md"
REFERENCE = ROOT / "docs" / "reference"


def errors_table() -> str:
    """Every code of `convgrad.errors`, and how each transport says it."""
    rows = ["| code | HTTP | gRPC | Python | retried |", "| --- | ---: | --- | --- | --- |"]
    for error in ServiceError.__subclasses__():
        row = CODES[error.code]
        grpc = f"`{row.grpc_status}`" if row.grpc_status else "none"
        retried = "yes" if row.retryable else "no"
        rows.append(
            f"| `{row.code}` | {row.http_status} | {grpc} | `{error.__name__}` | {retried} |"
        )
    return "\n".join(rows)


TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    README: {
        "training_short": network_tables.training_short_table,
        "networks": network_tables.networks_table,
    },
    REFERENCE / "settings.md": {"settings": markdown_table},
    REFERENCE / "errors.md": {"errors": errors_table},
    SPEED: {
        "network_classes": network_tables.network_classes_table,
        "network_types": network_tables.network_types_table,
        "other_networks": network_tables.other_networks_table,
        "training": network_tables.training_table,
        "host": network_tables.host_table,
        "losses": network_tables.losses_table,
        "gpu": speed_tables.gpu_table,
        "poolings": speed_tables.poolings_table,
        "cpu_means": speed_tables.cpu_means_table,
        "cpu": speed_tables.cpu_table,
        "cpu_networks": speed_tables.cpu_networks_table,
        "serve_short": speed_tables.serve_short_table,
        "serve": speed_tables.serve_table,
        "wire": speed_tables.wire_table,
        "engine_gpu": speed_tables.engine_gpu_table,
        "devices": speed_tables.devices_table,
    },
    ARCHITECTURE: {
        "serve_shortcuts": speed_tables.serve_shortcuts_table,
        "serve_remaining": speed_tables.serve_remaining_table,
    },
    KERNELS: {"families": family_tables.families_table},
    DEPLOY: {"image": image_table, "scaling_limits": load_tables.scaling_limits_table},
    LOAD: {
        "load": load_tables.load_table,
        "open_loop": load_tables.open_loop_table,
        "ramp": load_tables.ramp_table,
        "soak": load_tables.soak_table,
        "ray": load_tables.ray_table,
        "ray_scaling": load_tables.ray_scaling_table,
        "ray_costs": load_tables.ray_costs_table,
    },
}


# The tables of GPU kernels' speed, by the bench whose rows they are made of.
OF_GPU: Mapping[str, tuple[str, ...]] = {
    "gpu": ("gpu",),
    "networks": ("networks", "network_classes"),
    "network_types": ("network_types",),
    "other_networks": ("other_networks",),
    "poolings": ("poolings",),
}


def rendered(document: Path, left: Collection[str] = ()) -> str:
    """The document's text with every table made afresh but those named ``left``."""
    text = document.read_text(encoding="utf-8")
    for name, table in TABLES[document].items():
        if name in left:
            continue
        before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        if mark:
            _, end, after = rest.partition("<!-- end -->")
            text = f"{before}{mark}{table().strip()}\n{end}{after}"
    return text


def main() -> int:
    """Write every table; those of GPU kernels only while each row is of today's kernels.

    Also the table of what is left to PyTorch, which the service ships.
    """
    peer_times.main()
    stale = {bench: stale_rows(records(bench)) for bench in OF_GPU}
    left = [table for bench, tables in OF_GPU.items() if stale[bench] for table in tables]
    for document in TABLES:
        document.write_text(rendered(document, left), encoding="utf-8")
    for bench, rows in stale.items():
        if rows:
            print(*rows[:10], sep="\n", file=sys.stderr)
            print(
                f"{len(rows)} rows of {bench}.jsonl were measured before their kernels changed: "
                f"the tables of {bench} are left as they are; measure again (bench_gpu and "
                "bench_networks have --stale), or run python -m tests.perf.stale --drop",
                file=sys.stderr,
            )
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
