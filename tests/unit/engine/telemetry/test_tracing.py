"""The exporter of traces that the transports of a process share."""

from __future__ import annotations

import asyncio

from convgrad_service.engine.telemetry.tracing import traces_to

NOBODY = "http://127.0.0.1:9/v1/traces"


def test_a_server_that_starts_after_another_exports_its_traces() -> None:
    """The first one's exporter is shut down with it."""
    first = traces_to(NOBODY)
    for each in (first, traces_to(NOBODY)):
        each.open()
    asyncio.run(first.close())
    assert traces_to(NOBODY) is first
    asyncio.run(first.close())
    assert traces_to(NOBODY) is not first
    traces_to.cache_clear()
