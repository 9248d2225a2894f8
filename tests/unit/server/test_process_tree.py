"""What the main process of a server waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from convgrad_service.server.process_tree import run_until_signalled


class Tree:
    """A tree with one front end in its process, which fails."""

    def __init__(self) -> None:
        self.local_tasks: list[asyncio.Task[None]] = []
        self.killed = False

    async def start(self) -> int:
        self.local_tasks.append(asyncio.ensure_future(self._serve()))
        return 1

    async def _serve(self) -> None:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    async def kill(self) -> None:
        self.killed = True


def test_a_server_whose_front_end_fails_ends_with_its_error() -> None:
    """It would live on otherwise, and answer nobody."""
    tree: Any = Tree()
    ports: list[int] = []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(run_until_signalled(tree, ports.append), 5))
    assert ports == [1]
    assert tree.killed
