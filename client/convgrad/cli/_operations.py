"""``convgrad operations``: prints a table of the operations of a server or of the contract."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from convgrad.cli._connection import add_connection_options, connect
from convgrad.contract import OPERATIONS

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad operations`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="convgrad operations",
        description="List the operations of a server; tensors in [brackets] are optional.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="list this client's operations without asking a server",
    )
    parser.add_argument("--json", action="store_true", help="print full descriptions as JSON")
    add_connection_options(parser)
    options = parser.parse_args(argv)
    listed = _offline() if options.offline else _online(options)
    print(json.dumps(listed, indent=2) if options.json else _table(listed))
    return 0


def _online(options: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    with connect(options) as client:
        return client.operations()


def _offline() -> Mapping[str, Mapping[str, Any]]:
    return {
        name: {
            "name": name,
            "summary": operation.summary,
            "tensors": {
                tensor: {"required": tensor in operation.required_tensors}
                for tensor in operation.tensors
            },
            "outputs": list(operation.outputs),
            "dtypes": list(operation.dtypes),
            "layouts": list(operation.layouts),
        }
        for name, operation in OPERATIONS.items()
    }


def _table(listed: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [("operation", "takes", "returns"), *(_row(*item) for item in listed.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name:{widths[0]}}  {takes:{widths[1]}}  {gives}" for name, takes, gives in rows
    )


def _row(name: str, fields: Mapping[str, Any]) -> tuple[str, str, str]:
    takes = (
        tensor if described.get("required") else f"[{tensor}]"
        for tensor, described in fields.get("tensors", {}).items()
    )
    return name, ", ".join(takes), ", ".join(fields.get("outputs", ()))
