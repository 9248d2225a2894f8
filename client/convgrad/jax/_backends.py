"""The backends: NumPy arrays in, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad import calls
from convgrad._bridges import RemoteBackend, find_executor

__all__ = ["Backend", "Local", "Remote", "chosen_backend"]

Array = NDArray[Any]
# Prepared operations that a Local keeps, the most recently used ones.
_MOST_PREPARED = 4096


class Backend(Protocol):
    """Computes operations of the contract. Hashable, and safe to call from several threads."""

    name: str

    def compute(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> list[Array]:
        """Compute one operation.

        Parameters
        ----------
        operation : str
            A name of the contract, e.g. ``conv_bwd_data``.
        inputs : mapping of str to array
            Its tensors, by the contract's names.
        parameters : mapping
            The other fields of the request, all hashable.
        outputs : sequence of str
            The results to return, in this order.

        Raises
        ------
        convgrad.ConvgradError
            The operation is refused, or failed.
        """
        ...


class Local:
    """Computes in this process, on the GPU or CPU that holds the arrays, without copying them.

    Arrays on other devices, and on a GPU that the service cannot use, are copied to the host and
    computed there.

    Raises
    ------
    convgrad.DeviceUnavailable
        The service is not installed here.
    """

    name = "local"

    def __init__(self) -> None:
        executor = find_executor()("cpu", 0)

        @lru_cache(maxsize=_MOST_PREPARED)
        def prepared(operation: str, tensors: Any, parameters: Any) -> Any:
            return executor.prepare(operation, dict(tensors), dict(parameters))

        self._prepared = prepared

    def compute(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> list[Array]:
        """See `Backend.compute`."""
        arrays = {name: np.ascontiguousarray(each) for name, each in inputs.items()}
        specs = tuple((name, (each.shape, str(each.dtype))) for name, each in arrays.items())
        prepared = self._prepared(operation, specs, tuple(parameters.items()))
        results = {
            name: np.empty(spec.shape, spec.dtype.numpy) for name, spec in prepared.outputs.items()
        }
        given = [arrays[name] for name in prepared.inputs]
        prepared.launch([each.ctypes.data for each in (*given, *results.values())], 0, 0)
        return [results[name] for name in outputs]

    def __eq__(self, other: object) -> bool:
        # What JAX has compiled for one, it need not compile for another.
        return self is other or (type(self) is Local and type(other) is Local)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return "Local()"


class Remote(RemoteBackend):
    """Sends each pass to a server.

    Parameters
    ----------
    url : str, optional
        The server, as `convgrad.Client` takes it.
    client : convgrad.Client, optional
        A client to use instead; the caller closes it.
    **options
        Passed to `convgrad.Client`, e.g. ``transport="shm"`` for a server on this host.
    """

    def compute(
        self,
        operation: str,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> list[Array]:
        """See `Backend.compute`."""
        call = getattr(calls, operation)(**inputs, **parameters)
        answer = self._client.call(replace(call, read=dict))
        return [answer.outputs[name] for name in outputs]


def chosen_backend(backend: Backend | None) -> Backend:
    """Return the backend given, or else the process's own `Local`.

    Raises
    ------
    TypeError
        The argument is not a backend.
    convgrad.DeviceUnavailable
        As `Local`.
    """
    given: Any = backend
    if given is None:
        return _default()
    if isinstance(given, type) or not hasattr(given, "compute"):
        raise TypeError(f"backend: expected a backend, such as Local(), got {given!r}")
    found: Backend = given
    return found


@lru_cache(maxsize=1)
def _default() -> Backend:
    return Local()
