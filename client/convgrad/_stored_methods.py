"""Methods of `Client` for tensors stored on the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from numpy.typing import ArrayLike, NDArray

from convgrad._call import Stored
from convgrad._exchange import Target
from convgrad._stored import drop_target, fetch_target, list_target, put_target

__all__ = ["StoredTensors"]

R = TypeVar("R")


class StoredTensors(ABC):
    """Mixin of `Client`."""

    @abstractmethod
    def _complete(self, target: Target[R]) -> R: ...

    def put(self, name: str, tensor: ArrayLike, *, time_to_live_s: float | None = None) -> Stored:
        """Store a tensor on the server under a name and return a reference to use in requests.

        Replaces any tensor stored under that name. To store outputs, use
        ``with_options(store=...)``.

        Parameters
        ----------
        name
            1 to 128 letters, digits, dots, dashes and underscores.
        tensor
            Anything that NumPy can convert to an array.
        time_to_live_s
            Seconds after its last use at which the server deletes it. The default, and the
            maximum, is the server's limit.

        Raises
        ------
        MalformedRequest
            The name is not 1 to 128 letters, digits, dots, dashes and underscores.
        Overloaded
            The server's storage for tensors is full.
        ConvgradError
            As for `conv_bwd_data`.

        Examples
        --------
        >>> weight = client.put("layer1.weight", weight)
        >>> output = client.conv_fwd(x, weight)
        """
        return self._complete(put_target(name, tensor, time_to_live_s))

    def fetch(self, name: str) -> NDArray[Any]:
        """Download a stored tensor.

        Parameters
        ----------
        name
            Name of the tensor on the server.

        Raises
        ------
        NotFound
            No tensor has that name.

        Examples
        --------
        >>> weight = client.fetch("layer1.weight")
        """
        return self._complete(fetch_target(name))

    def drop(self, name: str) -> None:
        """Delete a stored tensor.

        Parameters
        ----------
        name
            Name of the tensor on the server.

        Raises
        ------
        NotFound
            No tensor has that name.

        Examples
        --------
        >>> client.drop("layer1.weight")
        """
        self._complete(drop_target(name))

    def stored(self) -> Mapping[str, Stored]:
        """Return the tensors stored on the server, by name.

        Examples
        --------
        >>> sum(kept.nbytes for kept in client.stored().values())
        """
        return self._complete(list_target())
