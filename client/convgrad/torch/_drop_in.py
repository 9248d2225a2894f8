"""Functions that take the place of PyTorch's, and what they leave to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from convgrad.errors import ServiceError
from convgrad.torch._choice import CHOICE, left_to_pytorch, shapes
from convgrad.torch._report import count_left
from convgrad.torch._tensors import DTYPES, INDICES, is_transformed

__all__ = ["drop_in", "foreign"]

_DEVICES = ("cpu", "cuda")
_DTYPES_AND_INDICES = {**DTYPES, **INDICES}


def drop_in(
    ours: Any, theirs: Callable[..., Any], name: str, document: str
) -> Callable[..., torch.Tensor]:
    """Return ``ours`` as a public function that does all that PyTorch's does.

    Like PyTorch's functions it honours ``__torch_function__``, so that proxies of ``torch.fx`` and
    subclasses of tensors are not evaluated here. ``theirs`` computes what our operators have no
    rules for: calls within functorch's transforms or forward-mode differentiation, and tensors of
    other devices, dtypes and layouts. Unless `use` was called with ``fallback=False``, it also
    takes what ``ours`` refuses, and so computes it or raises PyTorch's own error.

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

    def compute_by_pytorch(reason: str, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = theirs(*given, **options)
        if not torch.compiler.is_compiling():
            count_left(name, shapes(*_tensors(given, options)), reason)
        return result

    @wraps(ours)
    def function(*given: Any, **options: Any) -> Any:
        every = (*given, *options.values())
        if has_torch_function(every):
            return handle_torch_function(function, every, *given, **options)
        reason = foreign(every)
        if reason is not None:
            return compute_by_pytorch(reason, given, options)
        if torch.compiler.is_compiling():
            return ours(*given, **options)
        try:
            return ours(*given, **options)
        except ServiceError as error:
            if not left_to_pytorch(error, _tensors(given, options)[0]):
                raise
            return compute_by_pytorch(error.detail, given, options)
        except (AttributeError, TypeError, ValueError) as error:
            if not CHOICE.fallback:
                raise
            return compute_by_pytorch(str(error), given, options)

    return function


def _tensors(given: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    return [each for each in (*given, *options.values()) if isinstance(each, torch.Tensor)]


def foreign(values: tuple[Any, ...]) -> str | None:
    """Return why our operators cannot take these arguments, or None if they can."""
    if is_transformed():
        return "a transform of functorch, or forward-mode differentiation"
    dtypes: Any = DTYPES  # of the first tensor; others may be indices
    for each in values:
        if isinstance(each, torch.Tensor):
            if each.device.type not in _DEVICES:
                return f"device {each.device.type}"
            if each.layout is not torch.strided:
                return f"layout {each.layout}"
            if each.dtype not in dtypes:
                return f"dtype {each.dtype}"
            dtypes = _DTYPES_AND_INDICES
    return None
