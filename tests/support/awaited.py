"""`AsyncClient` behind the methods of `Client`: one test then holds both."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import convgrad

__all__ = ["CLIENTS", "Awaited"]


class Awaited:
    """The methods of an `AsyncClient`, each run to completion on its own event loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.client = convgrad.AsyncClient(*arguments, **options)

    def with_options(self, **changes: Any) -> Awaited:
        other = copy.copy(self)
        other.client = self.client.with_options(**changes)
        return other

    def __getattr__(self, name: str) -> Any:
        if name == "client":  # a copy that has none yet
            raise AttributeError(name)
        found = getattr(self.client, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            returned = found(*arguments, **named)
            if inspect.isasyncgen(returned):
                return _iterated(returned)
            return asyncio.run(returned) if inspect.isawaitable(returned) else returned

        return call

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self.client.close())


def _iterated(items: AsyncIterator[Any]) -> Iterator[Any]:
    with asyncio.Runner() as runner:
        try:
            while True:
                try:
                    yield runner.run(anext(items))  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            runner.run(items.aclose())  # type: ignore[attr-defined]


CLIENTS: tuple[Any, ...] = (convgrad.Client, Awaited)
