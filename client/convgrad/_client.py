"""`Client`: every operation as a blocking method."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

import httpx
import numpy as np
from numpy.typing import DTypeLike, NDArray

from convgrad import _calls
from convgrad._call import Answer, Call, as_tensor, check_call
from convgrad._direct import DirectTransport, is_direct
from convgrad._events import EventHooks
from convgrad._examinations import Examinations
from convgrad._exchange import Exchange, Requests, Target
from convgrad._methods import method
from convgrad._options import OptionChanges, Options
from convgrad._parts import PARTS_WIRE, Part, PartReader
from convgrad._stored_methods import StoredTensors
from convgrad._targets import LIVE, OPERATIONS_LIST, READY, OperationsInfo, call_target
from convgrad._transport import HttpxTransport, Transport, check_open, shared_memory
from convgrad.dtypes import DType
from convgrad.errors import ConvgradError

__all__ = ["Client"]

T = TypeVar("T")
R = TypeVar("R")


class Client(Examinations, StoredTensors):
    """A client with a connection pool to one convgrad server.

    Use it as a context manager, or call `close`. Threads may share a client.

    Parameters
    ----------
    base_url
        Address of the server, which may include a path. Defaults to the environment variable
        ``CONVGRAD_URL``, then http://127.0.0.1:8000.
    api_key
        Sent as ``Authorization: Bearer <api_key>``. Defaults to the environment variable
        ``CONVGRAD_API_KEY``, if set.
    timeout
        Seconds for one call, including retries and the delays between them; None for no limit.
        Sent to the server as X-Request-Timeout, so that it stops computing in time.
    connect_timeout
        Seconds to wait for a connection.
    read_timeout
        Seconds without data before a connection counts as lost; None to wait as long as
        ``timeout`` allows. A server sends nothing while it computes.
    max_retries
        How many times a call is sent again after a lost connection, a 429, 502, 503 or 504 from
        a proxy, or an error that the table in `convgrad.errors` marks as retryable. Delays grow
        exponentially, with jitter, and honour Retry-After. Retrying is always safe: operations
        are pure functions.
    wire
        "safetensors", or "json" (slower; for servers behind a proxy that inspects bodies).
    headers
        Headers to send with every request.
    event_hooks
        Functions to call on each request, response, retry, failure and progress event, such as
        ``{"retry": [print]}``; see `convgrad.EventHooks` and `convgrad.progress_bars`. Every
        event except progress is also logged to the logger ``convgrad``.
    transport
        "http", or "shm" for a server on this machine that sets CONVGRAD_SYSTEM_SHARED_MEMORY:
        tensors are then passed in shared memory, and requests only refer to them. Results stay
        in shared memory while they are in use, and are sent again without a copy; see `empty`.
    http_client
        Your own `httpx.Client`, whose proxies, certificates, limits and transport are then used;
        you close it. Without one, plain HTTP uses the client's own sockets; HTTPS, and HTTP if
        the environment sets a proxy, use httpx.
    sleep
        Function that waits between attempts; tests replace it.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> with convgrad.Client("http://127.0.0.1:8000") as client:
    ...     grad_input = client.conv_bwd_data(grad_output, weight, stride=2, padding=1)
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
        http_client: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
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
        self._transport: Transport
        if http_client is None and is_direct(self._options.base_url):
            self._transport = DirectTransport(self._options.base_url)
        else:
            self._transport = HttpxTransport(http_client)
        self._sleep = sleep
        self._shared = shared_memory(transport)

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
    conv_transpose_fwd = method(_calls.conv_transpose_fwd)
    conv_transpose_backward = method(_calls.conv_transpose_backward)
    conv_double_backward = method(_calls.conv_double_backward)
    conv_transpose_double_backward = method(_calls.conv_transpose_double_backward)
    maxpool1d_fwd = method(_calls.maxpool1d_fwd)
    maxpool1d_bwd = method(_calls.maxpool1d_bwd)
    avg_pool_fwd = method(_calls.avg_pool_fwd)
    avg_pool_bwd = method(_calls.avg_pool_bwd)
    adaptive_avg_pool_fwd = method(_calls.adaptive_avg_pool_fwd)
    adaptive_avg_pool_bwd = method(_calls.adaptive_avg_pool_bwd)
    adaptive_max_pool_fwd = method(_calls.adaptive_max_pool_fwd)
    adaptive_max_pool_bwd = method(_calls.adaptive_max_pool_bwd)
    max_unpool_fwd = method(_calls.max_unpool_fwd)
    max_unpool_bwd = method(_calls.max_unpool_bwd)

    def call(self, call: Call[T]) -> Answer[T]:
        """Send a Call and return its outputs together with the server's report and timings.

        Parameters
        ----------
        call
            A Call made by a function of `convgrad.calls`.

        Raises
        ------
        TypeError
            ``call`` is not a Call.
        ConvgradError
            As for `conv_bwd_data`.

        Examples
        --------
        >>> answer = client.call(convgrad.calls.conv_bwd_data(grad_output, weight, stride=2))
        >>> answer.report.kernel, answer.server_timing_s["compute"]
        """
        call = check_call(call).storing(self._options.store)
        if self._shared is not None:
            return self._send_all(self._shared.call(call))
        return self._complete(call_target(call, self._options.wire))

    def iterate(self, call: Call[Any]) -> Iterator[Part]:
        """Send a Call and yield the rows of its outputs as they arrive.

        A request is retried only until its first rows arrive. Tensors are sent over HTTP even with
        ``transport="shm"``. Stopping the iteration early closes the connection.

        Parameters
        ----------
        call
            A Call made by a function of `convgrad.calls`.

        Raises
        ------
        ConnectionFailed
            Also if the answer ends prematurely.
        ConvgradError
            As for `conv_bwd_data`.

        Examples
        --------
        >>> for part in client.iterate(convgrad.calls.conv_bwd_data(grad_output, weight)):
        ...     use(part.output, part.start, part.array)
        """
        call = check_call(call).storing(self._options.store)
        exchange = self._exchange(call_target(call, PARTS_WIRE))
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
                delay_s = exchange.retry_delay_s(error, possible=not begun)
            self._sleep(delay_s)

    def empty(self, shape: Sequence[int], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Allocate an uninitialized array to fill and send.

        With ``transport="shm"`` the array is in shared memory and is sent without a copy. Results
        are returned in shared memory too.

        Parameters
        ----------
        shape
            Shape of the array.
        dtype
            float16, bfloat16, float32, float64, int32 or int64.

        Raises
        ------
        MalformedRequest
            No operation accepts the dtype.
        ValueError
            A dimension is negative.
        ClientError
            The shared memory cannot be allocated.

        Examples
        --------
        >>> x = client.empty((8, 64, 56, 56))
        >>> x[...] = images
        """
        blank = np.broadcast_to(as_tensor("empty", np.empty((), dtype)), shape)
        if self._shared is None or blank.size == 0:
            return np.empty(blank.shape, blank.dtype)
        return self._send_all(self._shared.empty(blank.shape, DType(blank.dtype.name)))

    def operations(self) -> OperationsInfo:
        """Return the server's description of each operation, by name: tensors, dtypes, layouts.

        Raises
        ------
        ConnectionFailed, ClientTimeout, InvalidAnswer
            The server could not be reached, or gave no valid answer.

        Examples
        --------
        >>> client.operations()["conv_fwd"]["layouts"]
        """
        return self._complete(OPERATIONS_LIST)

    def is_live(self) -> bool:
        """Return whether a server answers at the base URL.

        Examples
        --------
        >>> client.is_live()
        """
        return self._succeeds(LIVE)

    def is_ready(self) -> bool:
        """Return whether the server accepts work.

        Examples
        --------
        >>> while not client.is_ready():
        ...     time.sleep(1)
        """
        return self._succeeds(READY)

    def with_options(self, **changes: Unpack[OptionChanges]) -> Client:
        """Return a copy of this client with other options.

        The copy shares this client's connections; only the original closes them.

        Parameters
        ----------
        timeout, connect_timeout, read_timeout, max_retries, wire, api_key, event_hooks
            As for `Client`.
        headers
            Headers to send in addition to the client's own.
        store
            Outputs for the server to store instead of sending, by name: with
            ``store={"grad_input": "g"}``, grad_input is returned as a `Stored` named g.

        Raises
        ------
        TypeError
            An option does not exist.

        Examples
        --------
        >>> y = client.with_options(timeout=5, store={"output": "y"}).conv_fwd(x, weight)
        """
        other = copy.copy(self)
        other._options = self._options.changed(changes)
        other._owns_transport = False
        return other

    def close(self) -> None:
        """Close the connections, except those of an ``http_client`` passed in.

        Examples
        --------
        >>> client.close()  # or use the client as a context manager
        """
        if self._owns_transport and not self._transport.closed:
            if self._shared is not None:
                self._send_all(self._shared.close())
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options.base_url!r})"

    def _exchange(self, target: Target[R]) -> Exchange[R]:
        check_open(self._transport.closed)
        return Exchange(target, self._options)

    def _succeeds(self, target: Target[Any]) -> bool:
        check_open(self._transport.closed)
        try:
            self.with_options(max_retries=0)._complete(target)
        except ConvgradError:
            return False
        return True

    def _complete(self, target: Target[R]) -> R:
        exchange = self._exchange(target)
        while True:
            try:
                return exchange.read(self._transport.send(exchange))
            except ConvgradError as error:
                delay_s = exchange.retry_delay_s(error)
            self._sleep(delay_s)

    def _send_all(self, requests: Requests[R]) -> R:
        try:
            target = next(requests)
            while True:
                try:
                    result = self._complete(target)
                except BaseException as error:  # noqa: BLE001 - thrown on, to where it belongs
                    target = requests.throw(error)
                else:
                    target = requests.send(result)
        except StopIteration as done:
            returned: R = done.value
            return returned
