"""``convgrad demo``: trains a small network to read digits with gradients from a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from convgrad.demo.options import parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status: 0 if every check passed, else 1."""
    arguments = parser().parse_args(sys.argv[1:] if argv is None else argv)
    # Imported here because it needs the packages of the extra `demo`.
    from convgrad.demo.command import run

    return run(arguments)
