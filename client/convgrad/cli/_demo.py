"""``convgrad demo``: runs `convgrad.demo`, which needs the packages of an extra."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from convgrad.cli._failures import UsageError

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run the demo."""
    try:
        status: int = importlib.import_module("convgrad.demo").main(list(argv))
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"demo needs {missing.name}, which is missing; "
            "install it with: pip install 'convgrad[demo]', or '.[demo]' in a checkout"
        ) from missing
    return status
