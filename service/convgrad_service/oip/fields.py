"""Turns an inference request into the operation's named fields and its parts of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, Operation
from convgrad.errors import MalformedRequest, NotFound, UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.engine import Engine, call_hub
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.request import blank
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry
from convgrad_service.oip.request import InferInput, InferRequest, parse_parameters
from convgrad_service.server.settings import Settings

VERSION = "1"
"""The only version of every model."""

Kind = Literal["system", "cuda"]
_TITLES: Mapping[Kind, str] = {"system": "system", "cuda": "CUDA"}


def operation_named(model: str, version: str = "") -> Operation:
    """Return the operation with a model's name; ``version`` is "" if the request has none.

    Raises
    ------
    NotFound
        There is no such operation, or no such version of it.
    """
    operation = OPERATIONS.get(model)
    if operation is None:
        raise NotFound(f"there is no model {shown(model)}; the models are {', '.join(OPERATIONS)}")
    if version not in ("", VERSION):
        raise NotFound(f"{model} has no version {shown(version)}; it has {VERSION}")
    return operation


def request_fields(
    request: InferRequest, array_of: Callable[[InferInput], NDArray[Any]]
) -> dict[str, Any]:
    """Return the fields of the operation's request: parameters, and inputs by ``array_of``.

    Raises
    ------
    MalformedRequest
        A parameter cannot be read, has the name of an input, or contradicts the named outputs.
    """
    operation = request.operation
    parameters = parse_parameters(request.parameters)
    for name in parameters:
        if name in operation.tensors:
            raise MalformedRequest(
                f"{shown(name)} is given as a parameter; {operation.name} takes it as an input"
            )
    named = output_fields(operation, [output.name for output in request.outputs])
    for name, value in named.items():
        if name in parameters and not _agree(parameters[name], value):
            raise MalformedRequest(
                f"the parameter {shown(name)} is {shown(parameters[name])}, but the request's "
                f"outputs ask for {shown(value)}; expected them to agree, or one of them alone"
            )
    tensors = {tensor.name: array_of(tensor) for tensor in request.inputs}
    return {**parameters, **named, **tensors}


def output_fields(operation: Operation, names: list[str]) -> Mapping[str, Any]:
    """Return the fields that request the outputs ``names``; none if ``names`` is empty."""
    fields = operation.request.model_fields
    if not names:
        return {}
    if "outputs" in fields:
        return {"outputs": names}
    if "return_indices" in fields and "indices" in names:
        return {"return_indices": True}
    return {}


def _agree(given: Any, named: Any) -> bool:
    if isinstance(given, list) and isinstance(named, list):
        return sorted(map(str, given)) == sorted(named)
    return bool(given == named)


def array_or_blank(tensor: InferInput) -> NDArray[Any]:
    """Return an input's array if it was sent as JSON, else a blank of its shape and dtype."""
    source = tensor.source
    if isinstance(source, np.ndarray):
        return source
    return blank(tensor.shape, tensor.dtype, name=tensor.name)


class SharedMemory:
    """The regions that clients have registered; each belongs to the ``owner`` who registered it.

    Kinds that are not enabled are refused with UnsupportedProblem.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        enabled: dict[Kind, bool] = {
            "system": settings.system_shared_memory,
            "cuda": settings.cuda_shared_memory,
        }
        self._kinds: Collection[Kind] = [kind for kind, on in enabled.items() if on]
        self.extensions = tuple(f"{kind}_shared_memory" for kind in self._kinds)

    async def register(self, owner: str, info: RegionInfo) -> None:
        """Map a region; raises a ServiceError if it does not match the registration."""
        self._require("system" if info.device is None else "cuda")
        await call_hub(self._engine, Hub.register_region, owner, info)

    async def unregister(self, owner: str, kind: Kind, name: str) -> None:
        """Drop a region once nothing in flight uses it; a ``name`` of "" drops all of the kind."""
        # Triton's clients drop all regions of both kinds before they register any.
        if name or not self._kinds:
            self._require(kind)
        if kind in self._kinds:
            await call_hub(
                self._engine, RegionRegistry.unregister, owner, name, on_device=kind == "cuda"
            )

    async def status(self, owner: str, kind: Kind, name: str) -> list[dict[str, Any]]:
        """Describe the owner's regions of a kind, or the one named; raises NotFound if missing."""
        self._require(kind)
        listed = RegionRegistry.list_regions
        found = await call_hub(self._engine, listed, owner, name, on_device=kind == "cuda")
        return [_described(info) for info in found]

    def parts(self, owner: str, regions: Mapping[str, RegionPart]) -> Mapping[str, RegionPart]:
        """Return these regions as the owner's; raises UnsupportedProblem if disabled."""
        if regions and not self._kinds:
            name, region = next(iter(regions.items()))
            raise UnsupportedProblem(
                f"{name}: the region {shown(region.name)} cannot be used; shared memory is "
                "not enabled on this server"
            )
        return {name: region._replace(owner=owner) for name, region in regions.items()}

    def _require(self, kind: Kind) -> None:
        if kind not in self._kinds:
            raise UnsupportedProblem(
                f"{_TITLES[kind]} shared memory is not enabled on this server; to enable it, start "
                f"the server with CONVGRAD_{kind.upper()}_SHARED_MEMORY=true"
            )


def _described(info: RegionInfo) -> dict[str, Any]:
    """Return a region as the protocol describes it, in JSON and in its messages."""
    where: dict[str, Any] = {"key": info.key, "offset": info.offset}
    if info.device is not None:
        where = {"device_id": info.device}
    return {"name": info.name, **where, "byte_size": info.size_bytes}
