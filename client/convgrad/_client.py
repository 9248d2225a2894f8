"""`Client`: every operation as a method that waits for its answer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import httpx
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from convgrad import _calls
from convgrad._call import Answer, Call, Stored, as_tensor
from convgrad._direct import DirectTransport, is_direct
from convgrad._exchange import Exchange, OptionChanges, Options, Target
from convgrad._methods import method
from convgrad._parts import PARTS_WIRE, Part, PartReader
from convgrad._stored import drop_target, fetch_target, list_target, put_target
from convgrad._targets import LIVE, OPERATIONS_LIST, READY, OperationsInfo, call_target
from convgrad._transport import HttpxTransport, Transport
from convgrad.dtypes import DType
from convgrad.errors import ConvgradError

if TYPE_CHECKING:
    from convgrad._shared_calls import SharedMemory

__all__ = ["Client"]

T = TypeVar("T")
R = TypeVar("R")


def _shared_memory(transport: str, complete: Callable[[Target[Any]], Any]) -> SharedMemory | None:
    if transport == "http":
        return None
    if transport != "shm":
        raise ValueError(f"transport: expected http or shm, got {transport!r}")
    # Not every system has what it needs, and few programs need it.
    from convgrad._shared_calls import SharedMemory

    return SharedMemory(complete)


class Client:
    """A connection pool to one convgrad server. Use it as a context manager, or `close` it.

    ::

        with convgrad.Client("http://127.0.0.1:8000") as client:
            grad_input = client.conv_bwd_data(grad_output, weight, stride=2, padding=1)

    Threads may share a client.

    Parameters
    ----------
    base_url
        The server's address; a path in it is kept.
    timeout
        Seconds for one call in all, retries and the waits between them included; None for no
        bound. The server is told (X-Request-Timeout), so it does not compute for no one.
    retries
        How often a call is sent again after a connection that failed or an error that the table
        in `convgrad.errors` marks retryable. Waits grow exponentially, with jitter, and honour
        Retry-After. Sending again is always safe: operations are pure functions.
    wire
        "safetensors", or "json" (slower; for servers behind something that reads bodies).
    headers
        Sent with every request: a key, for instance.
    transport
        "http", or "shm" for a server on this machine that has CONVGRAD_SYSTEM_SHARED_MEMORY set:
        tensors then lie in shared memory, and requests only say where. Results stay there while
        they are used, and sent again they are not copied; see `empty`.
    http_client
        An `httpx.Client` of the caller's own, whose proxies, certificates, limits or transport
        are then used, and which the caller closes. Without one, plain HTTP goes over sockets of
        the client's own, and HTTPS, or HTTP where the environment names a proxy, through httpx.
    sleep
        Waits between attempts; a test passes its own.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        retries: int = 2,
        wire: str = "safetensors",
        headers: Mapping[str, str] | None = None,
        transport: str = "http",
        http_client: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = Options(base_url, timeout, retries, wire, dict(headers or {}))
        self._owns_transport = True
        self._transport: Transport
        if http_client is None and is_direct(base_url):
            self._transport = DirectTransport(base_url)
        else:
            self._transport = HttpxTransport(http_client)
        self._sleep = sleep
        self._shared = _shared_memory(transport, self._complete_own)

    conv_bwd_data = method(_calls.conv_bwd_data)
    grouped_conv_bwd_weight = method(_calls.grouped_conv_bwd_weight)
    maxpool2d_bwd = method(_calls.maxpool2d_bwd)
    maxpool3d_bwd = method(_calls.maxpool3d_bwd)
    conv3d_backprop_input = method(_calls.conv3d_backprop_input)
    grouped_conv_conv_fwd = method(_calls.grouped_conv_conv_fwd)
    conv3d_transpose = method(_calls.conv3d_transpose)
    conv_fwd = method(_calls.conv_fwd)
    maxpool2d_fwd = method(_calls.maxpool2d_fwd)
    maxpool3d_fwd = method(_calls.maxpool3d_fwd)
    conv_backward = method(_calls.conv_backward)

    def call(self, call: Call[T]) -> Answer[T]:
        """Send a Call, and return its outputs together with the server's report and timings.

        Raises
            As `conv_bwd_data`.
        """
        call = call.storing(self._options.store)
        if self._shared is not None:
            return self._shared.call(call, self._complete_own)
        return self._complete(call_target(call, self._options.wire), self._options)

    def iterate(self, call: Call[Any]) -> Iterator[Part]:
        """Send a Call, and yield the rows of its outputs as they come: a server computes a large
        problem in parts, and sends each when it is ready.

        ::

            for part in client.iterate(convgrad.calls.conv_bwd_data(grad_output, weight)):
                use(part.output, part.start, part.array)

        What is tried again is tried before the first part has come. Tensors go over HTTP, also
        with ``transport="shm"``. Whoever stops early ends the computation.

        Raises
            As `conv_bwd_data`; ConnectionFailed also where the answer breaks off in the middle.
        """
        exchange = Exchange(
            call_target(call.storing(self._options.store), PARTS_WIRE), self._options
        )
        while True:
            reader = PartReader()
            begun = False
            try:
                for receiver in self._transport.stream(exchange):
                    for part in reader.read(receiver):
                        begun = True
                        yield part
                exchange.read(receiver.finish())
                return
            except ConvgradError as error:
                if begun:
                    raise
                pause_s = exchange.pause_s(error)
            self._sleep(pause_s)

    def empty(self, shape: Sequence[int], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """An array of any content to be filled and sent; with ``transport="shm"`` it lies in
        shared memory, from where it is sent without a copy. Results lie there too.

        Raises
            MalformedRequest for a dtype that no operation takes; ClientError without such memory.
        """
        array = as_tensor("empty", np.empty((0,), dtype))
        if self._shared is None:
            return np.empty(tuple(shape), array.dtype)
        return self._shared.empty(tuple(shape), DType(array.dtype.name))

    def put(self, name: str, tensor: ArrayLike, *, time_to_live_s: float | None = None) -> Stored:
        """Keep a tensor on the server under a name, which then stands for it in requests.

        It stays for ``time_to_live_s`` since it was last used, at most as long as the server lets
        it, and what had the name before goes. Outputs are kept by ``with_options(store=...)``.

        Raises
            As `conv_bwd_data`; Overloaded while the server keeps as much as it may.
        """
        return self._complete(put_target(name, tensor, time_to_live_s), self._options)

    def fetch(self, name: str) -> NDArray[Any]:
        """A stored tensor's elements; raises NotFound where there is none of that name."""
        return self._complete(fetch_target(name), self._options)

    def drop(self, name: str) -> None:
        """Have the server forget a tensor; raises NotFound where there is none of that name."""
        self._complete(drop_target(name), self._options)

    def stored(self) -> Mapping[str, Stored]:
        """The tensors that the server keeps, by name."""
        return self._complete(list_target(), self._options)

    def operations(self) -> OperationsInfo:
        """What the server says of its operations, by name: tensors, dtypes, layouts.

        Raises
            ConnectionFailed, ClientTimeout and InvalidAnswer from the way there and back.
        """
        return self._complete(OPERATIONS_LIST, self._options)

    def is_live(self) -> bool:
        """Whether a server runs there."""
        return self._succeeds(LIVE)

    def is_ready(self) -> bool:
        """Whether the server takes work."""
        return self._succeeds(READY)

    def with_options(self, **changes: Unpack[OptionChanges]) -> Client:
        """This client with another ``timeout``, ``retries``, ``wire`` or ``store``.

        It shares the connections, which only the original closes.
        ``store`` names outputs that the server shall keep and not send: with
        ``store={"grad_input": "g"}`` what would be grad_input is a `Stored` called g.
        """
        other = copy.copy(self)
        other._options = self._options.changed(changes)
        other._owns_transport = False
        return other

    def close(self) -> None:
        """Close the connections, unless they are an injected client's."""
        if self._owns_transport:
            if self._shared is not None:
                self._shared.close()
            self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _succeeds(self, target: Target[Any]) -> bool:
        try:
            self._complete(target, replace(self._options, retries=0))
        except ConvgradError:
            return False
        return True

    def _complete_own(self, target: Target[R]) -> R:
        return self._complete(target, self._options)

    def _complete(self, target: Target[R], options: Options) -> R:
        exchange = Exchange(target, options)
        while True:
            try:
                return exchange.read(self._transport.send(exchange))
            except ConvgradError as error:
                pause_s = exchange.pause_s(error)
            self._sleep(pause_s)
