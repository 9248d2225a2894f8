"""Cancel scopes: deadlines and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from convgrad.errors import DeadlineExceeded
from convgrad_service.engine.admission import CancelScope, Deadline


class Gone(Exception):
    """The error that a scope is cancelled with."""


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def scoped(seconds: float, cut: Exception | None = None) -> None:
    with CancelScope(Deadline.after(seconds)) as scope:
        if cut is not None:
            asyncio.get_running_loop().call_soon(scope.cancel, cut)
        await asyncio.sleep(10)


def test_deadline_ends_the_scope() -> None:
    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match=r"within the 0\.02 s"):
            await scoped(0.02)
        await asyncio.sleep(0)  # the task itself is not cancelled

    run(scenario())


def test_cancel_raises_the_given_error() -> None:
    async def scenario() -> None:
        with pytest.raises(Gone):
            await scoped(10, Gone())
        await asyncio.sleep(0)

    run(scenario())


def test_block_that_ends_in_time_is_unaffected() -> None:
    async def scenario() -> None:
        with CancelScope(Deadline.after(0.5)):
            await asyncio.sleep(0)
        await asyncio.sleep(0.6)

    run(scenario())


def test_external_cancellation_takes_precedence() -> None:
    async def scenario() -> None:
        async def waits() -> None:
            with CancelScope(Deadline.after(10)) as scope:
                scopes.append(scope)
                await asyncio.sleep(10)

        scopes: list[CancelScope] = []
        for cancel_too in (False, True):
            task = asyncio.ensure_future(waits())
            await asyncio.sleep(0)
            task.cancel()
            if cancel_too:
                scopes[-1].cancel(Gone())
            with pytest.raises(asyncio.CancelledError):
                await task

    run(scenario())
