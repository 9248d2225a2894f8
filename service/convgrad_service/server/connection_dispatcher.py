"""Accepts connections and serves them in this process or passes them to others.

If several processes accept from one socket, one of them gets most of the connections that arrive
together, and the others idle. Instead the hub accepts all of them. Passing a connection to another
process costs a tenth of a millisecond, once per connection.

grpcio takes neither connections nor a listening socket, so the gRPC front end listens itself.
`SharedPort` listens in its place while it is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("convgrad.serve")
_BACKLOG = 2048
# Connections accepted before the event loop runs anything else.
_BATCH = 64
# Pause before accepting again when the system is out of descriptors or memory.
_ERROR_PAUSE_S = 0.1
_ERROR_LOG_INTERVAL_S = 10.0
# Pause after a connection was refused because there are too many.
_REFUSED_PAUSE_S = 0.01
# Connections that wait for a front end, and the size of one read from them.
_MAX_HELD, _RELAYED_BYTES = 256, 2**16

ConnectionHandler = Callable[[socket.socket], bool]
"""Takes ownership of a connection; returns False if it refused it."""


class ConnectionSource:
    """Passes connections to a handler while it is open. Use on the event loop's thread.

    They are accepted from a listening socket, or received over the SOCK_SEQPACKET socket through
    which the hub dispatches them, a message each.
    """

    def __init__(self, source: socket.socket, handler: ConnectionHandler) -> None:
        self._source, self._handler = source, handler
        self._loop = asyncio.get_running_loop()
        self._is_open = self._is_reading = False
        self._next_log_s = 0.0
        self._take = _received if source.type == socket.SOCK_SEQPACKET else _accepted

    def open(self) -> None:
        """Listen, if that is needed, and pass connections on."""
        if not self._is_open:
            self._is_open = True
            if self._take is _accepted:
                self._source.listen(_BACKLOG)
            self._source.setblocking(False)
            self._start_reading()

    def close(self) -> None:
        """Stop; new connections wait in the backlog."""
        self._is_open = False
        self._stop_reading()

    def _start_reading(self) -> None:
        if self._is_open and not self._is_reading:
            self._loop.add_reader(self._source.fileno(), self._read)
            self._is_reading = True

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self._source.fileno())
            self._is_reading = False

    def _pause(self, pause_s: float) -> None:
        self._stop_reading()
        self._loop.call_later(pause_s, self._start_reading)

    def _log_error(self, error: OSError) -> None:
        now_s = self._loop.time()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + _ERROR_LOG_INTERVAL_S
            _log.error("connections cannot be accepted: %s", error)

    def _read(self) -> None:
        for _ in range(_BATCH):
            try:
                connection = self._take(self._source)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except EOFError:  # the hub has closed its side
                self.close()
                return
            except OSError as error:
                self._log_error(error)
                self._pause(_ERROR_PAUSE_S)
                return
            if connection is not None and not self._handler(connection):
                self._pause(_REFUSED_PAUSE_S)
                return


def _accepted(listening: socket.socket) -> socket.socket | None:
    return listening.accept()[0]


def _received(channel: socket.socket) -> socket.socket | None:
    """Receive a connection; None if this process has no descriptor for it."""
    message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not message:
        raise EOFError
    return socket.socket(fileno=descriptors[0]) if descriptors else None


class ConnectionDispatcher:
    """Accepts connections from a bound socket and passes them to other processes, round robin.

    Use on the event loop's thread. While there are no receivers, connections wait in the backlog.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening, self._source = listening, ConnectionSource(listening, self._dispatch)
        self._receivers: deque[socket.socket] = deque()
        self._is_closed = False

    def add(self, receiver: socket.socket) -> None:
        """Add a receiving process: this side of its SOCK_SEQPACKET socket pair."""
        receiver.setblocking(False)
        self._receivers.append(receiver)
        self._source.open()

    def remove(self, receiver: socket.socket) -> None:
        """Remove a receiving process and close its socket."""
        if receiver in self._receivers:
            self._receivers.remove(receiver)
        receiver.close()
        if not self._receivers:
            self._source.close()
            if self._is_closed:
                self._listening.close()

    def close(self) -> None:
        """Refuse connections once the last receiver is gone, instead of letting them wait."""
        self._is_closed = True

    def _dispatch(self, connection: socket.socket) -> bool:
        """Pass a connection to the next receiver that takes it, or else close it."""
        with connection:
            for receiver in tuple(self._receivers):
                self._receivers.rotate(-1)
                try:
                    socket.send_fds(receiver, [b"."], [connection.fileno()])
                except BrokenPipeError:
                    self.remove(receiver)  # it has ended, or takes no more
                except OSError:
                    continue  # it does not read, with too many on the way
                else:
                    return True
        return False


class SharedPort:
    """A port on which a front end listens itself, with SO_REUSEPORT, whenever it is there.

    While it is not, this process listens, so that nobody is refused; what connects meanwhile is
    relayed to the front end once it listens. Takes over a bound socket; raises OSError if another
    program listens there. Use on the event loop's thread.
    """

    def __init__(self, bound: socket.socket) -> None:
        self._address = bound.getsockname()
        self.number: int = self._address[1]
        self._held: list[socket.socket] = []
        self._relays: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._listen(bound)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def add(self, _: socket.socket) -> None:
        """Relay what has connected: the front end listens."""
        self._stop_listening()
        for connection in self._held:
            relay = asyncio.ensure_future(_relay(connection, self._address[:2]))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)
        self._held.clear()

    def remove(self, receiver: socket.socket) -> None:
        """Listen, unless closed: the front end has ended. ``receiver`` is closed."""
        receiver.close()
        if self._is_closed or self._bound.fileno() >= 0:
            return
        # Without a descriptor for it, connections are refused until the front end is back.
        with contextlib.suppress(OSError):
            bound = socket.socket(socket.AF_INET6 if len(self._address) == 4 else socket.AF_INET)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                bound.setsockopt(socket.SOL_SOCKET, option, 1)
            bound.bind(self._address)
            self._listen(bound)

    def close(self) -> None:
        """Listen no more, even once the front end has ended; relays go on."""
        self._is_closed = True
        self._stop_listening()
        for connection in self._held:
            connection.close()

    def _listen(self, bound: socket.socket) -> None:
        self._bound, self._source = bound, ConnectionSource(bound, self._hold)
        self._source.open()

    def _stop_listening(self) -> None:
        if self._bound.fileno() >= 0:
            self._source.close()
            self._bound.close()

    def _hold(self, connection: socket.socket) -> bool:
        if has_room := len(self._held) < _MAX_HELD:
            self._held.append(connection)
        else:
            connection.close()
        return has_room


async def _relay(connection: socket.socket, address: tuple[str, int]) -> None:
    """Pass on what the two ends of a connection send, until one of them closes it."""
    try:
        other_reader, other_writer = await asyncio.open_connection(*address)
    except OSError:  # the front end has ended again
        connection.close()
        return
    reader, writer = await asyncio.open_connection(sock=connection)
    with contextlib.suppress(OSError):
        await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_RELAYED_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
