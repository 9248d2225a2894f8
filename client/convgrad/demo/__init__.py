"""``convgrad demo``: a small network learns to read digits with gradients from a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status: 0 where it showed what it promises, else 1."""
    # Imported here because its packages come with the extra `demo`.
    from convgrad.demo.command import run

    return run(sys.argv[1:] if argv is None else argv)
