"""Turns the functions of `_calls` into client methods, including docstring and signature.

Each operation is defined once: to a type checker and to `help`, `Client.conv_fwd` takes the
parameters of `_calls.conv_fwd` and returns the outputs of that Call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from convgrad._call import Answer, Call

__all__ = ["async_method", "by_name", "described_like", "method"]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLES = "Examples\n--------\n"


class _Caller(Protocol):
    def call(self, call: Call[T], /) -> Answer[T]: ...


class _AsyncCaller(Protocol):
    def call(self, call: Call[T], /) -> Awaitable[Answer[T]]: ...


def method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Make the `Client` method that sends the Call made by ``build``."""

    @functools.wraps(build)
    def send(self: _Caller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(build(*args, **kwargs)).outputs

    _describe(send, build)
    return send


def async_method(
    build: Callable[P, Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make the `AsyncClient` method that sends the Call made by ``build``."""

    @functools.wraps(build)
    async def send(self: _AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return (await self.call(build(*args, **kwargs))).outputs

    _describe(send, build)
    if send.__doc__:  # python -OO has removed it
        send.__doc__ = send.__doc__.replace("= client.", "= await client.")
    return send


def by_name(build: Callable[P, T]) -> Callable[P, T]:
    """Reject positional tensors, because similar operations take them in another order."""

    @functools.wraps(build)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if args:
            raise TypeError(
                f"{build.__name__} takes its tensors only as keyword arguments, input=… and "
                "grad_output=…: conv_bwd_data and conv_backward have grad_output first"
            )
        return build(*args, **kwargs)

    return checked


def described_like(sibling: Callable[..., Any]) -> Callable[[F], F]:
    """Give an `AsyncClient` method the docstring of its `Client` sibling, with its own examples."""

    def describe(method: F) -> F:
        shared, own = inspect.getdoc(sibling), inspect.getdoc(method)
        if shared and own:  # python -OO has removed both
            text = shared.partition(_EXAMPLES)[0]
            method.__doc__ = text + _EXAMPLES + own.partition(_EXAMPLES)[2]
        return method

    return describe


def _describe(send: Callable[..., Any], build: Callable[..., Any]) -> None:
    signature = inspect.signature(build)
    returns = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    send.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self, *signature.parameters.values()], return_annotation=returns
    )
    send.__annotations__ = build.__annotations__ | {"return": returns}
