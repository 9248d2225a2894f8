"""`Client`: every operation as a method that waits for its answer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

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

if TYPE_CHECKING:
    pass

__all__ = ["Client"]

T = TypeVar("T")
R = TypeVar("R")


class Client(Examinations, StoredTensors):
    """A connection pool to one convgrad server. Use it as a context manager, or `close` it.

    Threads may share a client.

    Parameters
    ----------
    base_url
        The server's address; a path in it is kept. By default the environment variable
        ``CONVGRAD_URL``, or http://127.0.0.1:8000.
    api_key
        Sent as ``Authorization: Bearer <api_key>``. By default the environment variable
        ``CONVGRAD_API_KEY``, if it is set.
    timeout
        Seconds for one call in all, retries and the waits between them included; None for no
        limit. The server is told (X-Request-Timeout), so that it stops computing in time.
    connect_timeout
        Seconds that making a connection may take.
    read_timeout
        Seconds that a connection may be silent before it counts as lost; None for as long as
        ``timeout``. A server is silent while it computes.
    max_retries
        How often a call is sent again after a lost connection, an answer of 429, 502, 503 or 504
        from a proxy, or an error that the table in `convgrad.errors` marks as retryable. Waits
        grow exponentially, with jitter, and honour Retry-After. Sending again is always safe:
        operations are pure functions.
    wire
        "safetensors", or "json" (slower; for servers behind something that reads bodies).
    headers
        Sent with every request.
    event_hooks
        Functions to call at each request, response, retry and failure, and as an attempt makes
        progress: ``{"retry": [print]}``, see `convgrad.EventHooks` and `convgrad.progress_bars`.
        All but progress is also logged to the logger ``convgrad``.
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

    Raises
    ------
    ValueError
        For an argument that cannot work.

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

    def call(self, call: Call[T]) -> Answer[T]:
        """Send a Call, and return its outputs together with the server's report and timings.

        Parameters
        ----------
        call
            What a function of `convgrad.calls` makes.

        Raises
        ------
        TypeError
            It is no Call.
        ConvgradError
            As `conv_bwd_data`.

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
        """Send a Call, and yield the rows of its outputs as they come: a server computes a large
        problem in parts, and sends each when it is ready.

        What is tried again is tried before the first part has come. Tensors go over HTTP, also
        with ``transport="shm"``. Whoever stops early ends the computation.

        Parameters
        ----------
        call
            What a function of `convgrad.calls` makes.

        Raises
        ------
        ConnectionFailed
            Also where the answer breaks off in the middle.
        ConvgradError
            As `conv_bwd_data`.

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
        """An array of any content to be filled and sent; with ``transport="shm"`` it lies in
        shared memory, from where it is sent without a copy. Results lie there too.

        Parameters
        ----------
        shape
            Its extents.
        dtype
            float16, bfloat16, float32, float64, int32 or int64.

        Raises
        ------
        MalformedRequest
            No operation takes that dtype.
        ClientError
            There is no such memory.

        Examples
        --------
        >>> x = client.empty((8, 64, 56, 56))
        >>> x[...] = images
        """
        array = as_tensor("empty", np.empty((0,), dtype))
        if self._shared is None:
            return np.empty(tuple(shape), array.dtype)
        return self._send_all(self._shared.empty(tuple(shape), DType(array.dtype.name)))

    def operations(self) -> OperationsInfo:
        """What the server says of its operations, by name: tensors, dtypes, layouts.

        Raises
        ------
        ConnectionFailed, ClientTimeout, InvalidAnswer
            From the way there and back.

        Examples
        --------
        >>> client.operations()["conv_fwd"]["layouts"]
        """
        return self._complete(OPERATIONS_LIST)

    def is_live(self) -> bool:
        """Whether a server runs there.

        Examples
        --------
        >>> client.is_live()
        """
        return self._succeeds(LIVE)

    def is_ready(self) -> bool:
        """Whether the server takes work.

        Examples
        --------
        >>> while not client.is_ready():
        ...     time.sleep(1)
        """
        return self._succeeds(READY)

    def with_options(self, **changes: Unpack[OptionChanges]) -> Client:
        """This client with other options; it shares the connections, which only the original
        closes.

        Parameters
        ----------
        timeout, connect_timeout, read_timeout, max_retries, wire, api_key, event_hooks
            As for the client.
        headers
            Sent besides the client's own.
        store
            Outputs that the server shall keep and not send: with ``store={"grad_input": "g"}``
            what would be grad_input is a `Stored` called g.

        Raises
        ------
        TypeError
            For the name of no option.

        Examples
        --------
        >>> y = client.with_options(timeout=5, store={"output": "y"}).conv_fwd(x, weight)
        """
        other = copy.copy(self)
        other._options = self._options.changed(changes)
        other._owns_transport = False
        return other

    def close(self) -> None:
        """Close the connections, unless they are an injected client's.

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
