"""``convgrad serve`` and ``convgrad kernels``: run commands of the service without importing it.

The service is found by name in the entry-point group ``convgrad.commands``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from convgrad.cli._failures import UsageError

__all__ = ["run"]

_ADVICE = "install it with: pip install 'convgrad[service]', or '.[service]' in a checkout"


def run(argv: Sequence[str], command: str) -> int:
    """Run one of the service's commands until it finishes or is stopped."""
    found = tuple(entry_points(group="convgrad.commands", name=command))
    if not found:
        raise UsageError(f"{command} needs the service, which is not installed; {_ADVICE}")
    try:
        status = _load(found[0])(list(argv))
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"{command} needs {missing.name}, which is missing; {_ADVICE}"
        ) from missing
    return status or 0


def _load(entry: EntryPoint) -> Callable[[list[str]], int | None]:
    command: Callable[[list[str]], int | None] = entry.load()
    return command
