"""The engine as front ends use it: the hub, in this process or in another."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from convgrad_service.engine.hub import Hub
from convgrad_service.engine.ipc.remote_hub import RemoteHub

Engine = Hub | RemoteHub
P = ParamSpec("P")
T = TypeVar("T")


@overload
def call_hub(
    engine: Engine,
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    *arguments: P.args,
    **options: P.kwargs,
) -> Coroutine[Any, Any, T]: ...


@overload
def call_hub(
    engine: Engine,
    method: Callable[Concatenate[Any, P], T],
    *arguments: P.args,
    **options: P.kwargs,
) -> Coroutine[Any, Any, T]: ...


def call_hub(
    engine: Engine, method: Callable[..., Any], *arguments: Any, **options: Any
) -> Coroutine[Any, Any, Any]:
    """Call a method of a hub's service wherever the hub is.

    ``method`` is a plain method of `TensorStore`, `RegionRegistry`, `RequestMetrics` or `Hub`
    itself, such as ``TensorStore.find``. Arguments and result must be picklable.
    """
    service, name = method.__qualname__.split(".")
    return engine.invoke(service, name, arguments, options)
