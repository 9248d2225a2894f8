"""Passes prepared once for each set of shapes, strides, dtypes and devices, and looked up after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from convgrad.errors import InvalidProblem, ServiceError, UnsupportedProblem
from convgrad.torch._backends import Backend, Operation
from convgrad.torch._report import Counter
from convgrad.torch._tensors import DTYPES, INDICES, dense, uses_tf32

__all__ = ["NOTED", "PASSES", "Noted", "Pass", "key_of", "prepared", "why_not"]


class Noted(NamedTuple):
    """A call of a pass.

    Attributes
    ----------
    runner : Runner
    counter : Counter
    given : sequence of Tensor
        The runner's tensors as the caller gave them.
    tensors : sequence of Tensor
        As the runner got them: copies of those that were not dense.
    results : sequence of Tensor, optional
        None if it is left to PyTorch.
    """

    runner: Any
    counter: Counter
    given: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor | None] | None


class _Calls(threading.local):
    calls: list[Noted] | None = None


NOTED = _Calls()
"""A list that receives the calls of passes by this thread, while one is set."""


def why_not(*tensors: torch.Tensor) -> str | None:
    """Return the reason why no backend computes on these tensors, or None if one can."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"dtype {tensor.dtype}"
        if tensor.dtype is not first.dtype or tensor.device != first.device:
            return "tensors of different dtypes or devices"
        if tensor.numel() == 0:
            return "an empty tensor"
        if tensor.layout is not torch.strided or not 3 <= tensor.dim() <= 5:
            return f"a {tensor.dim()}-dimensional {tensor.layout} tensor"
    return None


class Pass:
    """A prepared pass of one layer.

    Attributes
    ----------
    runner : Runner
    channels_last : bool
        Whether it computes in a channels-last memory format.
    inputs, outputs : tuple of int
        The indices of the runner's tensors and results among those of the pass.
    all_in_order : bool
        Whether ``inputs`` are all of the tensors.
    scattered : tuple of int
        The indices, among the runner's tensors, of those to be copied into the memory format.
    blank : list of None
        As many as the pass has results.
    counter : Counter
        Counts the calls for `report`.
    left : Counter or None
        Counts those left to PyTorch, where its own kernel was measured to be faster.
    """

    __slots__ = (
        "all_in_order",
        "blank",
        "channels_last",
        "counter",
        "inputs",
        "left",
        "outputs",
        "runner",
        "scattered",
    )

    def __init__(
        self,
        backend: Backend,
        operation: Operation,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        results: Sequence[str],
        layer: str,
        channels_last: bool,
    ) -> None:
        """Prepare ``operation`` on ``tensors``, which have ``names``.

        Raises
        ------
        convgrad.ServiceError
            The backend refuses the operation.
        """
        floating = [each for each in tensors if each.dim() > 1 and each.dtype not in INDICES]
        reason = why_not(*(floating or tensors[:1]))
        if reason is not None:
            raise UnsupportedProblem(f"{backend.name} does not take {reason}")
        if uses_tf32(tensors[0]) and "pool" not in operation.name:
            parameters = {**operation.parameters, "precision": "high"}
            operation = replace(operation, parameters=parameters)
        self.channels_last = channels_last
        self.inputs = tuple(names.index(ours) for ours in operation.inputs.values())
        self.all_in_order = self.inputs == tuple(range(len(tensors)))
        self.outputs = tuple(results.index(ours) for ours in operation.outputs.values())
        given = [dense(tensors[index], channels_last) for index in self.inputs]
        # The key holds the strides, so that the same tensors need a copy in every call.
        self.scattered = tuple(
            place for place, index in enumerate(self.inputs) if given[place] is not tensors[index]
        )
        self.blank: list[torch.Tensor | None] = [None] * len(results)
        self.runner = backend.prepare(operation, given, channels_last=channels_last)
        self.counter = Counter(operation.name, layer, backend.name, self.runner)
        faster = getattr(self.runner, "faster_peer", None)
        self.left = Counter(operation.name, layer, "PyTorch", faster) if faster else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Compute it; a result is None that the operation does not have."""
        given = tensors if self.all_in_order else [tensors[index] for index in self.inputs]
        read = given
        if self.scattered:
            read = list(given)
            for place in self.scattered:
                read[place] = dense(given[place], self.channels_last)
        found, results = self.blank.copy(), self.runner(read)
        for index, result in zip(self.outputs, results, strict=True):
            found[index] = result
        self.counter.calls += 1
        if NOTED.calls is not None:
            NOTED.calls.append(Noted(self.runner, self.counter, given, read, results))
        return found

    def leave(self, counter: Counter) -> None:
        """Count a call that is left to PyTorch."""
        counter.calls += 1
        if NOTED.calls is not None:
            NOTED.calls.append(Noted(self.runner, counter, (), (), None))


PASSES: dict[Any, Pass | ServiceError] = {}
"""Prepared passes, and refusals, by `key_of`."""
# More layers and batch sizes than a process trains; beyond that the cache is cleared.
_MOSTPASSES = 65_536


def key_of(backend: Backend, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
    """Return the key of a pass on these tensors, where ``rest`` says which pass it is."""
    first = tensors[0]
    tf32 = first.dtype is torch.float32 and uses_tf32(first)
    key = [backend, tf32, first.device, rest]
    for tensor in tensors:
        key += tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
    return tuple(key)


def prepared(key: Any, prepare: Callable[..., Pass], *given: Any) -> Pass:
    """Return the cached pass of a key, or prepare it from what is given.

    Raises
    ------
    convgrad.ServiceError
        The backend refuses the problem.
    """
    kept = PASSES.get(key)
    if isinstance(kept, Pass):
        return kept
    if isinstance(kept, ServiceError):
        raise kept
    if len(PASSES) >= _MOSTPASSES:
        PASSES.clear()
    try:
        made = PASSES[key] = prepare(*given)
    except ServiceError as error:
        # Subclasses are not cached: they may be temporary refusals, such as NotCompiled.
        if type(error) in (InvalidProblem, UnsupportedProblem):
            PASSES[key] = error
        raise
    return made
