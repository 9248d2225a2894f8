"""What a transport does for a request on its way through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from convgrad_service.engine.execution import Execution
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.request import Decoded, Result

__all__ = ["Transport"]


class Transport(Protocol):
    """What a transport does for one request: read bytes into it, and write its result out.

    `Pipeline.run` calls the methods in the order in which they stand here.
    """

    streams: bool
    """Whether the answer may begin before all of it is computed."""

    keeps_deadline: bool
    """Whether `head` keeps the deadline itself, and must not be cancelled at it."""

    async def head(self) -> Hashable | None:
        """Receive what stands before the tensors' data.

        Returns a key that is the same for all requests that differ in their tensors' data alone, or
        None. What was decoded of a request is remembered by its key.
        """
        ...

    @property
    def holds(self) -> Lease | None:
        """What `decode` reads, if that lies in the arena."""
        ...

    @property
    def quick(self) -> bool:
        """Whether `decode` takes no time worth a thread."""
        ...

    def decode(self) -> Decoded:
        """What the request says. May be called in a thread, and not at all if its key is known."""
        ...

    async def fill(self, execution: Execution) -> None:
        """Receive or decode the tensors' data to where ``execution`` has its inputs."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Have ``gone`` called if the client goes away, until this is called with None."""
        ...

    async def send(self, execution: Execution, result: Result) -> None:
        """Encode the result and send it; nothing may refer to its arrays once this returns."""
        ...
