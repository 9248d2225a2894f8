"""`Remote`: a convgrad server computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from convgrad import Client, calls
from convgrad._bridges import RemoteBackend
from convgrad.torch._backends import Operation, Runner
from convgrad.torch._tensors import contract_layout, contract_order, to_numpy, to_torch, torch_order

__all__ = ["Remote"]


class Remote(RemoteBackend):
    """Sends each pass to a server; tensors on a GPU are copied to the host first.

    Parameters
    ----------
    url : str, optional
        The server, as `convgrad.Client` takes it.
    client : convgrad.Client, optional
        A client to use instead; the caller closes it.
    **options
        Passed to `convgrad.Client`, e.g. ``transport="shm"`` for a server on this host.

    Raises
    ------
    convgrad.ClientError
        While computing: the server could not be reached; or any `convgrad.ServiceError` of it.
    """

    def prepare(
        self, operation: Operation, tensors: Sequence[torch.Tensor], *, channels_last: bool
    ) -> Runner:
        """See `Backend.prepare`."""
        layout = contract_layout(tensors[0].dim(), channels_last)
        return _Request(self._client, operation, {**operation.parameters, **layout}, channels_last)


class _Request:
    """Sends one operation to a server. See `Runner`."""

    def __init__(
        self, client: Client, operation: Operation, parameters: dict[str, Any], channels_last: bool
    ) -> None:
        self._kernel = ""
        self._client, self._operation = client, operation
        self._parameters, self._last = parameters, channels_last

    @property
    def kernel(self) -> str:
        return self._kernel

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        arrays = {
            name: to_numpy(contract_order(tensor, self._last))
            for name, tensor in zip(self._operation.inputs, tensors, strict=True)
        }
        make = getattr(calls, self._operation.name)
        answer = self._client.call(replace(make(**arrays, **self._parameters), read=dict))
        self._kernel = f"{answer.report.backend}: {answer.report.kernel}"
        device = tensors[0].device
        return [
            torch_order(to_torch(answer.outputs[name], device), self._last)
            for name in self._operation.outputs
        ]
