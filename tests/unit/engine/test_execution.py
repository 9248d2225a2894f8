"""Tensors allocated for a request that fails are freed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from convgrad.errors import Overloaded
from convgrad_service.engine.engine import Engine
from convgrad_service.engine.execution import abandon


class Refusing:
    """An engine whose hub refuses every call."""

    def __init__(self) -> None:
        self.called: list[str] = []

    async def invoke(self, service: str, method: str, *_: Any) -> None:
        self.called.append(f"{service}.{method}")
        raise Overloaded("the hub is busy")


def test_a_hub_that_refuses_does_not_hide_why_a_request_failed() -> None:
    engine = Refusing()

    async def fail() -> None:
        try:
            raise ValueError("the request's own error")
        except BaseException:
            await abandon(cast(Engine, engine), {})
            raise

    with pytest.raises(ValueError, match="own error"):
        asyncio.run(fail())
    assert engine.called == ["TensorStore.abandon"]
