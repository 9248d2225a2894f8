"""Functions that take the place of PyTorch's, and what they leave to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from convgrad.torch._choice import shapes
from convgrad.torch._report import count_left
from convgrad.torch._tensors import is_transformed

__all__ = ["drop_in", "foreign"]

_DEVICES = ("cpu", "cuda")


def drop_in(
    ours: Any, theirs: Callable[..., Any], name: str, document: str
) -> Callable[..., torch.Tensor]:
    """Return ``ours`` as a public function that does all that PyTorch's does.

    Like PyTorch's functions it honours ``__torch_function__``, so that proxies of ``torch.fx`` and
    subclasses of tensors are not evaluated here. ``theirs`` computes what our operators have no
    rules for: calls within functorch's transforms or forward-mode differentiation, and tensors of
    other devices and complex dtypes.

    Parameters
    ----------
    ours, theirs : callable
        With the same parameters.
    name, document : str
        The name and the docstring.

    Returns
    -------
    callable
    """
    ours.__name__ = ours.__qualname__ = name
    ours.__doc__ = document

    @wraps(ours)
    def function(*given: Any, **options: Any) -> Any:
        every = (*given, *options.values())
        if has_torch_function(every):
            return handle_torch_function(function, every, *given, **options)
        reason = foreign(every)
        if reason is None:
            return ours(*given, **options)
        tensors = [each for each in every if isinstance(each, torch.Tensor)]
        if not torch.compiler.is_compiling():
            count_left(name, shapes(*tensors), reason)
        return theirs(*given, **options)

    return function


def foreign(values: tuple[Any, ...]) -> str | None:
    """Return why our operators cannot take these arguments, or None if they can."""
    if is_transformed():
        return "a transform of functorch, or forward-mode differentiation"
    for each in values:
        if isinstance(each, torch.Tensor):
            if each.device.type not in _DEVICES:
                return f"device {each.device.type}"
            if each.is_complex():
                return f"dtype {each.dtype}"
    return None
