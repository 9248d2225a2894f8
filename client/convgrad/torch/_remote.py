"""`Remote`: a convgrad server computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from convgrad import Client, calls
from convgrad.torch._backends import Operation
from convgrad.torch._tensors import contract_layout, contract_order, to_numpy, to_torch, torch_order

__all__ = ["Remote"]


class Remote:
    """Sends each pass to a server; tensors on any device, copied by way of the host.

    Parameters
    ----------
    url : str, optional
        The server, as `convgrad.Client` takes it.
    client : convgrad.Client, optional
        A client to use instead, which stays the caller's to close.
    **options
        Passed to `convgrad.Client`, e.g. ``transport="shm"`` for a server on this host.

    Raises
    ------
    convgrad.ClientError
        While computing: the way to the server failed; or any `convgrad.ServiceError` of it.
    """

    def __init__(
        self, url: str | None = None, *, client: Client | None = None, **options: Any
    ) -> None:
        self._own = client is None
        if client is None:
            client = Client(url, **options) if url is not None else Client(**options)
        self._client = client
        self.name = f"remote {url}" if url else "remote"

    def run(
        self, operation: Operation, tensors: Mapping[str, torch.Tensor], *, channels_last: bool
    ) -> tuple[dict[str, torch.Tensor], str]:
        """See `Backend.run`."""
        arrays = {
            name: to_numpy(contract_order(tensors[ours], channels_last))
            for name, ours in operation.inputs.items()
        }
        any_tensor = next(iter(tensors.values()))
        layout = contract_layout(any_tensor.dim(), channels_last)
        make = getattr(calls, operation.name)
        call = replace(make(**arrays, **operation.parameters, **layout), read=dict)
        answer = self._client.call(call)
        results = {
            ours: torch_order(to_torch(answer.outputs[name], any_tensor.device), channels_last)
            for name, ours in operation.outputs.items()
        }
        return results, f"{answer.report.backend}: {answer.report.kernel}"

    def close(self) -> None:
        """Close the client's connections, unless the client was given."""
        if self._own:
            self._client.close()

    def __repr__(self) -> str:
        return f"Remote({self.name})"
