"""`AsyncClient`: every operation as a method to await."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

import httpx
from numpy.typing import ArrayLike, NDArray

from convgrad import _calls
from convgrad._call import Answer, Call, Stored
from convgrad._exchange import Exchange, OptionChanges, Options, Target
from convgrad._http_errors import ROOTS
from convgrad._methods import async_method
from convgrad._parts import PARTS_WIRE, Part, PartReader
from convgrad._reply import Receiver, Reply, async_raw_chunks
from convgrad._stored import drop_target, fetch_target, list_target, put_target
from convgrad._targets import LIVE, OPERATIONS_LIST, READY, OperationsInfo, call_target
from convgrad.errors import ConvgradError

__all__ = ["AsyncClient"]

T = TypeVar("T")
R = TypeVar("R")


class AsyncClient:
    """`Client` for asynchronous programs; parameters and methods are the same.

    ::

        async with convgrad.AsyncClient() as client:
            grad_input = await client.conv_bwd_data(grad_output, weight, stride=2)

    ``http_client`` is an `httpx.AsyncClient`, and ``sleep`` is awaited: under trio,
    pass trio's. With ``wire="json"`` large tensors hold up the event loop while they become text;
    safetensors bodies are views, and do not.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        retries: int = 2,
        wire: str = "safetensors",
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._options = Options(base_url, timeout, retries, wire, dict(headers or {}))
        self._owns_http = http_client is None
        self._http = http_client or httpx.AsyncClient()
        self._sleep = sleep

    conv_bwd_data = async_method(_calls.conv_bwd_data)
    grouped_conv_bwd_weight = async_method(_calls.grouped_conv_bwd_weight)
    maxpool2d_bwd = async_method(_calls.maxpool2d_bwd)
    maxpool3d_bwd = async_method(_calls.maxpool3d_bwd)
    conv3d_backprop_input = async_method(_calls.conv3d_backprop_input)
    grouped_conv_conv_fwd = async_method(_calls.grouped_conv_conv_fwd)
    conv3d_transpose = async_method(_calls.conv3d_transpose)
    conv_fwd = async_method(_calls.conv_fwd)
    maxpool2d_fwd = async_method(_calls.maxpool2d_fwd)
    maxpool3d_fwd = async_method(_calls.maxpool3d_fwd)
    conv_backward = async_method(_calls.conv_backward)

    async def call(self, call: Call[T]) -> Answer[T]:
        """Send a Call, and return its outputs together with the server's report and timings.

        Raises
            As `conv_bwd_data`.
        """
        call = call.storing(self._options.store)
        return await self._complete(call_target(call, self._options.wire), self._options)

    async def iterate(self, call: Call[Any]) -> AsyncIterator[Part]:
        """Send a Call, and yield the rows of its outputs as they come; see `Client.iterate`."""
        exchange = Exchange(
            call_target(call.storing(self._options.store), PARTS_WIRE), self._options
        )
        while True:
            reader = PartReader()
            begun = False
            try:
                async for receiver in self._stream(exchange):
                    for part in reader.read(receiver):
                        begun = True
                        yield part
                exchange.read(receiver.finish())
                return
            except ConvgradError as error:
                if begun:
                    raise
                pause_s = exchange.pause_s(error)
            await self._sleep(pause_s)

    async def put(
        self, name: str, tensor: ArrayLike, *, time_to_live_s: float | None = None
    ) -> Stored:
        """Keep a tensor on the server under a name, which then stands for it in requests.

        It stays for ``time_to_live_s`` since it was last used, at most as long as the server lets
        it, and what had the name before goes. Outputs are kept by ``with_options(store=...)``.

        Raises
            As `conv_bwd_data`; Overloaded while the server keeps as much as it may.
        """
        return await self._complete(put_target(name, tensor, time_to_live_s), self._options)

    async def fetch(self, name: str) -> NDArray[Any]:
        """A stored tensor's elements; raises NotFound where there is none of that name."""
        return await self._complete(fetch_target(name), self._options)

    async def drop(self, name: str) -> None:
        """Have the server forget a tensor; raises NotFound where there is none of that name."""
        await self._complete(drop_target(name), self._options)

    async def stored(self) -> Mapping[str, Stored]:
        """The tensors that the server keeps, by name."""
        return await self._complete(list_target(), self._options)

    async def operations(self) -> OperationsInfo:
        """What the server says of its operations, by name: tensors, dtypes, layouts.

        Raises
            ConnectionFailed, ClientTimeout and InvalidAnswer from the way there and back.
        """
        return await self._complete(OPERATIONS_LIST, self._options)

    async def is_live(self) -> bool:
        """Whether a server runs there."""
        return await self._succeeds(LIVE)

    async def is_ready(self) -> bool:
        """Whether the server takes work."""
        return await self._succeeds(READY)

    def with_options(self, **changes: Unpack[OptionChanges]) -> AsyncClient:
        """This client with other options; see `Client.with_options`."""
        other = copy.copy(self)
        other._options = self._options.changed(changes)
        other._owns_http = False
        return other

    async def close(self) -> None:
        """Close the connections, unless they are an injected client's."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _succeeds(self, target: Target[Any]) -> bool:
        try:
            await self._complete(target, replace(self._options, retries=0))
        except ConvgradError:
            return False
        return True

    async def _complete(self, target: Target[R], options: Options) -> R:
        exchange = Exchange(target, options)
        while True:
            try:
                return exchange.read(await self._send(exchange))
            except ConvgradError as error:
                pause_s = exchange.pause_s(error)
            await self._sleep(pause_s)

    async def _send(self, exchange: Exchange[Any]) -> Reply:
        async for receiver in self._stream(exchange):
            last = receiver
        return last.finish()

    async def _stream(self, exchange: Exchange[Any]) -> AsyncIterator[Receiver]:
        """One attempt, whenever more of its answer has come; the last time with all of it."""
        try:
            request = exchange.request(self._http)
            response = await self._http.send(request, stream=True, follow_redirects=False)
            try:
                receiver = Receiver(response.status_code, response.headers, exchange.request_id)
                async for chunk in async_raw_chunks(response):
                    exchange.check_deadline()
                    receiver.add(chunk)
                    yield receiver
                    if receiver.has_enough:
                        break
                yield receiver
            finally:
                await response.aclose()
        except ROOTS as error:
            raise exchange.failed(error) from error
