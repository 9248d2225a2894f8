"""The protocols of in-process executors, and problems made from shapes and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.dtypes import DType
from convgrad.errors import UnsupportedProblem
from convgrad_service.problems import problem_from
from convgrad_service.problems.base import Problem, TensorSpec

if TYPE_CHECKING:
    from convgrad_service.inprocess.launch_plan import NativePlan

__all__ = ["Executor", "NotCompiled", "Planned", "Prepared", "problem_of"]


class NotCompiled(UnsupportedProblem):
    """The operation's kernels are being compiled in the background."""


class Prepared(Protocol):
    """An operation on tensors of known shapes, ready to launch.

    Two threads must not launch it on the same stream at the same time.

    Attributes
    ----------
    inputs, outputs : Mapping[str, TensorSpec]
        Dtypes, and shapes in the requested layout, in the order in which `launch` takes addresses:
        inputs, then outputs. All tensors are contiguous.
    workspace_bytes : int
        Additional device memory that a launch needs; 0 if the executor has its own.
    kernel : str
        The kernels that the plan chose.
    faster_peer : str or None
        What was measured to compute this problem faster on this device, and in what time.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    workspace_bytes: int
    kernel: str
    faster_peer: str | None

    def launch(
        self, addresses: Sequence[int], workspace: int, stream: int, *, capturing: bool = True
    ) -> None:
        """Launch the operation on tensors at these addresses.

        Parameters
        ----------
        addresses : sequence of int
            The address of each input, then of each output; in device memory for a GPU.
        workspace : int
            The address of ``workspace_bytes`` of memory, 256-byte aligned.
        stream : int
            The CUDA stream (``cudaStream_t``) to launch on; 0 on the CPU, where the call returns
            when the results are complete.
        capturing : bool
            Whether the stream may be capturing a graph. False saves a query of the driver.
        """
        ...

    def native(self, addresses: Sequence[int], stream: int) -> NativePlan | None:
        """Return the launches for native code to make, on this stream.

        Parameters
        ----------
        addresses : sequence of int
            As for `launch`; the native code sets others.
        stream : int
            The stream that it will launch on.

        Returns
        -------
        NativePlan or None
            None on the CPU, and if there are too many buffers.
        """
        ...


class Planned(Protocol):
    """An operation whose tensors and workspace are known, and whose kernels may still compile.

    Attributes
    ----------
    inputs, outputs, workspace_bytes
        As for `Prepared`.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    workspace_bytes: int


class Executor(Protocol):
    """Prepares operations for one device. Thread-safe."""

    def plan(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
    ) -> Planned:
        """Plan an operation, and start to compile its kernels in the background.

        Parameters and exceptions are those of `prepare`.
        """
        ...

    def prepare(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> Prepared:
        """Plan an operation, and compile and load its kernels.

        Parameters
        ----------
        operation : str
            A name of the contract, e.g. ``conv_bwd_data``.
        tensors : mapping of str to (shape, dtype)
            The inputs, by the contract's names, with shapes in the order of ``layout``.
        parameters : mapping
            The other fields of the request, e.g. ``stride``, ``layout``, ``outputs``.
        wait : bool
            Compile missing kernels now, in parallel. Otherwise they are compiled in the
            background, and `NotCompiled` is raised until they are ready.

        Raises
        ------
        MalformedRequest, InvalidProblem
            A parameter has the wrong type, or the sizes contradict each other.
        UnsupportedProblem
            No kernel supports it; as `NotCompiled`, its kernels are not ready yet.
        """
        ...


def problem_of(
    operation: str,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    parameters: Mapping[str, Any],
) -> Problem:
    """Return the problem that a request with these shapes would state. No elements are needed.

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
