"""What belongs to one process, such as connections: a fork or a pickle must not share it."""

from __future__ import annotations

import os
import weakref
from typing import Any

__all__ = ["OfOneProcess"]


class OfOneProcess:
    """Base of objects that are made anew, from ``arguments``, in a fork's child or from a pickle.

    Two processes that share a connection can read each other's answers, and two that share a
    region overwrite each other's tensors.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        _ALL.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def _abandon(self) -> None:
        """In a fork's child: close what the parent goes on using."""


_ALL: weakref.WeakSet[OfOneProcess] = weakref.WeakSet()


def _make_anew() -> None:
    for each in list(_ALL):
        each._abandon()
        vars(each).update(vars(type(each)(*each._arguments)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_anew)
