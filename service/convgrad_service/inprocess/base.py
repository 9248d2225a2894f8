"""What an in-process executor offers, and the problem that shapes and parameters state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.dtypes import DType
from convgrad.errors import UnsupportedProblem
from convgrad_service.problems import problem_from
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = ["Executor", "NotCompiled", "Prepared", "problem_of"]


class NotCompiled(UnsupportedProblem):
    """The operation's kernels are being compiled in the background."""


class Prepared(Protocol):
    """One operation on tensors of known shapes, ready to launch. Not to be launched by two
    threads at once on the same stream.

    Attributes
    ----------
    inputs, outputs : Mapping[str, TensorSpec]
        Shapes in the layout asked for, and dtypes, in the order that `launch` takes addresses in:
        inputs, then outputs. Every tensor is contiguous.
    workspace_bytes : int
        Device memory that a launch needs beside its tensors; 0 where the executor has its own.
    kernel : str
        The kernels that the plan chose.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    workspace_bytes: int
    kernel: str

    def launch(
        self, addresses: Sequence[int], workspace: int, stream: int, *, capturing: bool = True
    ) -> None:
        """Compute from and to these addresses.

        Parameters
        ----------
        addresses : sequence of int
            Of each input, then of each output; device memory for a GPU.
        workspace : int
            The address of ``workspace_bytes`` of memory, 256-byte aligned.
        stream : int
            The CUDA stream (``cudaStream_t``) to launch on; 0 on the CPU, where the results are
            there on return.
        capturing : bool
            Whether the stream may be capturing a graph. False saves asking the driver.
        """
        ...


class Executor(Protocol):
    """Prepares operations for one device. Safe to call from several threads."""

    def prepare(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> Prepared:
        """Plan an operation, and compile and load what it needs.

        Parameters
        ----------
        operation : str
            A name of the contract, e.g. ``conv_bwd_data``.
        tensors : mapping of str to (shape, dtype)
            The tensors given, by the contract's names, shapes in the order of ``layout``.
        parameters : mapping
            The other fields of the request, e.g. ``stride``, ``layout``, ``outputs``.
        wait : bool
            Compile missing kernels now, side by side. Otherwise they are compiled in the
            background, and `NotCompiled` is raised until they are there.

        Raises
        ------
        MalformedRequest, InvalidProblem
            The parameters are of the wrong kind, or the sizes contradict each other.
        UnsupportedProblem
            No kernel takes it; as `NotCompiled`, not yet.
        """
        ...


def problem_of(
    operation: str,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    parameters: Mapping[str, Any],
) -> Problem:
    """The problem that a request with these shapes would state; no data is touched.

    Raises
    ------
    MalformedRequest, InvalidProblem
        As `Executor.prepare`.
    """
    blank = {
        name: np.broadcast_to(np.zeros((), DType(dtype).numpy), shape)
        for name, (shape, dtype) in tensors.items()
    }
    request = validate(OPERATIONS[operation].request, {**blank, **parameters})
    return problem_from(operation, request)
