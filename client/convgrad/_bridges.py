"""What the framework bridges share: how they reach the in-process executor and a server."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from convgrad._client import Client
from convgrad.errors import DeviceUnavailable

__all__ = ["RemoteBackend", "find_executor", "find_in_process"]


@lru_cache(maxsize=1)
def find_in_process() -> Any:
    """Return the service's module ``inprocess``, without importing the service by name.

    Raises
    ------
    convgrad.DeviceUnavailable
        The service is not installed in this environment.
    """
    for entry in entry_points(group="convgrad.executors"):
        return import_module(entry.module)
    raise DeviceUnavailable(
        "Local computes in this process and needs the service, which is not installed here: "
        "pip install 'convgrad[service]', for a GPU 'convgrad[cuda13]' ('.[service]', '.[cuda13]' "
        "in a checkout); or let a server compute: Remote(url)"
    )


def find_executor() -> Any:
    """Return its function ``executor``. Raises as `find_in_process`."""
    return find_in_process().executor


class RemoteBackend:
    """Owns the client of a bridge's ``Remote``, unless the caller passed one in.

    Parameters
    ----------
    url : str, optional
        The server, as `convgrad.Client` takes it.
    client : convgrad.Client, optional
        A client to use instead; the caller closes it.
    **options
        Passed to `convgrad.Client`.
    """

    def __init__(
        self, url: str | None = None, *, client: Client | None = None, **options: Any
    ) -> None:
        self._owned = client is None
        if client is None:
            client = Client(url, **options) if url is not None else Client(**options)
        self._client = client
        self.name = f"remote {url}" if url else "remote"

    def close(self) -> None:
        """Close the client's connections, unless the caller passed the client in."""
        if self._owned:
            self._client.close()

    def __repr__(self) -> str:
        return f"Remote({self.name})"
