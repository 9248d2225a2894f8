"""The methods of `Client` for tensors that stay on the server."""

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
    """A part of `Client`."""

    @abstractmethod
    def _complete(self, target: Target[R]) -> R: ...

    def put(self, name: str, tensor: ArrayLike, *, time_to_live_s: float | None = None) -> Stored:
        """Keep a tensor on the server under a name; what is returned stands for it in requests.

        What had the name before goes. Outputs are kept by ``with_options(store=...)``.

        Parameters
        ----------
        name
            1 to 128 letters, digits, dots, dashes and underscores.
        tensor
            What NumPy makes an array of.
        time_to_live_s
            Seconds since its last use after which it is forgotten; at most, and by default, as
            long as the server allows.

        Raises
        ------
        MalformedRequest
            The name is not 1 to 128 letters, digits, dots, dashes and underscores.
        Overloaded
            The server keeps as much as it may.
        ConvgradError
            As `conv_bwd_data`.

        Examples
        --------
        >>> weight = client.put("layer1.weight", weight)
        >>> output = client.conv_fwd(x, weight)
        """
        return self._complete(put_target(name, tensor, time_to_live_s))

    def fetch(self, name: str) -> NDArray[Any]:
        """A stored tensor's elements.

        Parameters
        ----------
        name
            What it is called on the server.

        Raises
        ------
        NotFound
            There is none of that name.

        Examples
        --------
        >>> weight = client.fetch("layer1.weight")
        """
        return self._complete(fetch_target(name))

    def drop(self, name: str) -> None:
        """Have the server forget a tensor.

        Parameters
        ----------
        name
            What it is called on the server.

        Raises
        ------
        NotFound
            There is none of that name.

        Examples
        --------
        >>> client.drop("layer1.weight")
        """
        self._complete(drop_target(name))

    def stored(self) -> Mapping[str, Stored]:
        """The tensors that the server keeps, by name.

        Examples
        --------
        >>> sum(kept.nbytes for kept in client.stored().values())
        """
        return self._complete(list_target())
