"""`AsyncClient`: every operation as a coroutine method."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

import httpx
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from convgrad import _calls
from convgrad._call import Answer, Call, Stored, as_tensor, check_call
from convgrad._client import Client
from convgrad._direct import AsyncDirectTransport, is_direct
from convgrad._events import EventHooks
from convgrad._examinations import AsyncExaminations
from convgrad._exchange import Exchange, Requests, Target
from convgrad._methods import async_method, described_like
from convgrad._options import OptionChanges, Options
from convgrad._parts import PARTS_WIRE, Part, PartReader
from convgrad._stored import drop_target, fetch_target, list_target, put_target
from convgrad._targets import LIVE, OPERATIONS_LIST, READY, OperationsInfo, call_target
from convgrad._transport import AsyncHttpxTransport, AsyncTransport, check_open, shared_memory
from convgrad.dtypes import DType
from convgrad.errors import ConvgradError

__all__ = ["AsyncClient"]

T = TypeVar("T")
R = TypeVar("R")


class AsyncClient(AsyncExaminations):
    """Asynchronous counterpart of `Client`, with the same parameters and methods.

    Copying tensors to shared memory and encoding them with ``wire="json"`` block the event loop;
    safetensors bodies are views of the arrays and do not.

    Parameters
    ----------
    http_client
        Your own `httpx.AsyncClient`. Without one, plain HTTP under asyncio uses the client's own
        sockets.
    sleep
        Function awaited between attempts. Under trio, pass ``trio.sleep`` and an ``http_client``.
    base_url, api_key, timeout, connect_timeout, read_timeout, max_retries, wire, headers
        As for `Client`.
    event_hooks, transport
        As for `Client`; the hooks are ordinary functions, not coroutines.

    Examples
    --------
    >>> async with convgrad.AsyncClient() as client:
    ...     grad_input = await client.conv_bwd_data(grad_output, weight, stride=2)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        connect_timeout: float = 10.0,
        read_timeout: float | None = None,
        max_retries: int = 2,
        wire: Literal["safetensors", "json"] = "safetensors",
        headers: Mapping[str, str] | None = None,
        event_hooks: EventHooks | None = None,
        transport: Literal["http", "shm"] = "http",
        http_client: httpx.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._options = Options.of(
            base_url,
            api_key,
            headers,
            event_hooks,
            timeout=timeout,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_retries=max_retries,
            wire=wire,
        )
        self._owns_transport = True
        self._transport: AsyncTransport
        if http_client is None and is_direct(self._options.base_url):
            self._transport = AsyncDirectTransport(self._options.base_url)
        else:
            self._transport = AsyncHttpxTransport(http_client)
        self._sleep = sleep
        self._shared = shared_memory(transport)

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
    conv_transpose_fwd = async_method(_calls.conv_transpose_fwd)
    conv_transpose_backward = async_method(_calls.conv_transpose_backward)
    conv_double_backward = async_method(_calls.conv_double_backward)
    conv_transpose_double_backward = async_method(_calls.conv_transpose_double_backward)
    maxpool1d_fwd = async_method(_calls.maxpool1d_fwd)
    maxpool1d_bwd = async_method(_calls.maxpool1d_bwd)
    avg_pool_fwd = async_method(_calls.avg_pool_fwd)
    avg_pool_bwd = async_method(_calls.avg_pool_bwd)
    adaptive_avg_pool_fwd = async_method(_calls.adaptive_avg_pool_fwd)
    adaptive_avg_pool_bwd = async_method(_calls.adaptive_avg_pool_bwd)
    adaptive_max_pool_fwd = async_method(_calls.adaptive_max_pool_fwd)
    adaptive_max_pool_bwd = async_method(_calls.adaptive_max_pool_bwd)
    max_unpool_fwd = async_method(_calls.max_unpool_fwd)
    max_unpool_bwd = async_method(_calls.max_unpool_bwd)

    @described_like(Client.call)
    async def call(self, call: Call[T]) -> Answer[T]:
        """Send a Call and return its outputs with the server's report; see `Client.call`.

        Examples
        --------
        >>> answer = await client.call(convgrad.calls.conv_fwd(x, weight))
        """
        call = check_call(call).storing(self._options.store)
        if self._shared is not None:
            return await self._send_all(self._shared.call(call))
        return await self._complete(call_target(call, self._options.wire))

    @described_like(Client.iterate)
    async def iterate(self, call: Call[Any]) -> AsyncIterator[Part]:
        """Send a Call and yield the rows of its outputs as they arrive; see `Client.iterate`.

        Examples
        --------
        >>> async for part in client.iterate(convgrad.calls.conv_fwd(x, weight)):
        ...     use(part.output, part.start, part.array)
        """
        call = check_call(call).storing(self._options.store)
        exchange = self._exchange(call_target(call, PARTS_WIRE))
        while True:
            reader = PartReader()
            begun = False
            try:
                arriving = self._transport.stream(exchange)
                async with aclosing(arriving):  # type: ignore[type-var]
                    async for receiver in arriving:
                        for part in reader.read(receiver):
                            begun = True
                            yield part
                exchange.read(receiver.finish())
                return
            except ConvgradError as error:
                delay_s = exchange.retry_delay_s(error, possible=not begun)
            await self._sleep(delay_s)

    @described_like(Client.empty)
    async def empty(self, shape: Sequence[int], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Allocate an uninitialized array to fill and send; see `Client.empty`.

        Examples
        --------
        >>> x = await client.empty((8, 64, 56, 56))
        """
        blank = np.broadcast_to(as_tensor("empty", np.empty((), dtype)), shape)
        if self._shared is None or blank.size == 0:
            return np.empty(blank.shape, blank.dtype)
        return await self._send_all(self._shared.empty(blank.shape, DType(blank.dtype.name)))

    @described_like(Client.put)
    async def put(
        self, name: str, tensor: ArrayLike, *, time_to_live_s: float | None = None
    ) -> Stored:
        """Store a tensor on the server under a name; see `Client.put`.

        Examples
        --------
        >>> weight = await client.put("layer1.weight", weight)
        """
        return await self._complete(put_target(name, tensor, time_to_live_s))

    @described_like(Client.fetch)
    async def fetch(self, name: str) -> NDArray[Any]:
        """Download a stored tensor; see `Client.fetch`.

        Examples
        --------
        >>> weight = await client.fetch("layer1.weight")
        """
        return await self._complete(fetch_target(name))

    @described_like(Client.drop)
    async def drop(self, name: str) -> None:
        """Delete a stored tensor; see `Client.drop`.

        Examples
        --------
        >>> await client.drop("layer1.weight")
        """
        await self._complete(drop_target(name))

    @described_like(Client.stored)
    async def stored(self) -> Mapping[str, Stored]:
        """Return the tensors stored on the server, by name.

        Examples
        --------
        >>> kept = await client.stored()
        """
        return await self._complete(list_target())

    @described_like(Client.operations)
    async def operations(self) -> OperationsInfo:
        """Return the server's description of each operation; see `Client.operations`.

        Examples
        --------
        >>> (await client.operations())["conv_fwd"]["layouts"]
        """
        return await self._complete(OPERATIONS_LIST)

    async def is_live(self) -> bool:
        """Return whether a server answers at the base URL.

        Examples
        --------
        >>> await client.is_live()
        """
        return await self._succeeds(LIVE)

    async def is_ready(self) -> bool:
        """Return whether the server accepts work.

        Examples
        --------
        >>> await client.is_ready()
        """
        return await self._succeeds(READY)

    @described_like(Client.with_options)
    def with_options(self, **changes: Unpack[OptionChanges]) -> AsyncClient:
        """Return a copy of this client with other options; see `Client.with_options`.

        Examples
        --------
        >>> y = await client.with_options(timeout=5).conv_fwd(x, weight)
        """
        other = copy.copy(self)
        other._options = self._options.changed(changes)
        other._owns_transport = False
        return other

    async def close(self) -> None:
        """Close the connections, except those of an ``http_client`` passed in.

        Examples
        --------
        >>> await client.close()  # or use the client in `async with`
        """
        if self._owns_transport and not self._transport.closed:
            if self._shared is not None:
                await self._send_all(self._shared.close())
            await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options.base_url!r})"

    def _exchange(self, target: Target[R]) -> Exchange[R]:
        check_open(self._transport.closed)
        return Exchange(target, self._options)

    async def _succeeds(self, target: Target[Any]) -> bool:
        check_open(self._transport.closed)
        try:
            await self.with_options(max_retries=0)._complete(target)
        except ConvgradError:
            return False
        return True

    async def _complete(self, target: Target[R]) -> R:
        exchange = self._exchange(target)
        while True:
            try:
                return exchange.read(await self._transport.send(exchange))
            except ConvgradError as error:
                delay_s = exchange.retry_delay_s(error)
            await self._sleep(delay_s)

    async def _send_all(self, requests: Requests[R]) -> R:
        try:
            target = next(requests)
            while True:
                try:
                    result = await self._complete(target)
                except BaseException as error:  # noqa: BLE001 - thrown on, to where it belongs
                    target = requests.throw(error)
                else:
                    target = requests.send(result)
        except StopIteration as done:
            returned: R = done.value
            return returned
