"""The protocol of a backend, and how a layer's passes become operations of the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = [
    "Backend",
    "Geometry",
    "Operation",
    "Runner",
    "convolution",
    "convolution_backward",
    "max_pool",
]


@dataclass(frozen=True, slots=True)
class Geometry:
    """One convolution's geometry, a value per spatial dimension, as ATen's operators take it."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """The geometry's fields of a request."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the contract on a layer's tensors.

    ``inputs`` and ``outputs`` map the contract's names to the layer's (``input``, ``weight``,
    ``grad_input`` …): for a transposed convolution they differ.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """One operation on tensors of one set of shapes, dtypes and one device."""

    @property
    def kernel(self) -> str:
        """What computed it last."""
        ...

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute.

        Parameters
        ----------
        tensors : sequence of Tensor
            Those of ``operation.inputs``, in its order, in PyTorch's order of dimensions;
            contiguous, or all of them in a channels-last memory format.

        Returns
        -------
        sequence of Tensor
            Those of ``operation.outputs``, in its order, and in the same memory format.

        Raises
        ------
        convgrad.ConvgradError
            The backend failed, or the way to a server did.
        """
        ...


class Backend(Protocol):
    """Computes operations on tensors. Safe to call from several threads."""

    name: str

    def prepare(
        self, operation: Operation, tensors: Sequence[torch.Tensor], *, channels_last: bool
    ) -> Runner:
        """Get ready to compute an operation on tensors like these.

        Parameters
        ----------
        operation : Operation
            What to compute.
        tensors : sequence of Tensor
            As `Runner` takes them; only their shapes, dtype and device are looked at.
        channels_last : bool
            Whether they are in a channels-last memory format.

        Raises
        ------
        convgrad.ConvgradError
            The operation is refused.
        """
        ...


def convolution(geometry: Geometry, output_size: tuple[int, ...], *, bias: bool) -> Operation:
    """The forward pass: ``output`` from ``input``, ``weight`` and ``bias``.

    A transposed convolution is the gradient of a convolution's input; its bias is the caller's to
    add, and ``output_size`` its spatial size.
    """
    if geometry.transposed:
        return Operation(
            "conv_bwd_data",
            {"grad_output": "input", "weight": "weight"},
            {"grad_input": "output"},
            {**geometry.parameters, "input_size": output_size},
        )
    names = ("input", "weight", "bias") if bias else ("input", "weight")
    return Operation(
        "conv_fwd", {name: name for name in names}, {"output": "output"}, geometry.parameters
    )


def convolution_backward(
    geometry: Geometry,
    wanted: tuple[str, ...],
    input_size: tuple[int, ...],
    kernel_size: tuple[int, ...],
) -> tuple[Operation, ...]:
    """The backward pass: those of ``grad_input``, ``grad_weight`` and ``grad_bias`` wanted.

    The bias gradient of a transposed convolution, and one asked for alone, are not among them:
    they are sums of grad_output.
    """
    parameters = geometry.parameters
    to_input = {**parameters, "input_size": input_size}
    of_weight = {**parameters, "weight_size": kernel_size}
    if geometry.transposed:
        found = []
        if "grad_input" in wanted:
            found.append(
                Operation(
                    "conv_fwd",
                    {"input": "grad_output", "weight": "weight"},
                    {"output": "grad_input"},
                    parameters,
                )
            )
        if "grad_weight" in wanted:
            found.append(
                Operation(
                    "grouped_conv_bwd_weight",
                    {"input": "grad_output", "grad_output": "input"},
                    {"grad_weight": "grad_weight"},
                    of_weight,
                )
            )
        return tuple(found)
    outputs = {name: name for name in wanted}
    if wanted == ("grad_bias",):
        return ()
    if "grad_input" not in wanted:
        both = {"input": "input", "grad_output": "grad_output"}
        return (
            Operation(
                "grouped_conv_bwd_weight", both, outputs, {**of_weight, "outputs": list(wanted)}
            ),
        )
    if wanted == ("grad_input",):
        both = {"grad_output": "grad_output", "weight": "weight"}
        return (Operation("conv_bwd_data", both, outputs, to_input),)
    every = {name: name for name in ("grad_output", "input", "weight")}
    return (Operation("conv_backward", every, outputs, {**parameters, "outputs": list(wanted)}),)


def max_pool(
    ndim: int,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    *,
    backward: bool,
) -> Operation:
    """Max pooling in one to three dimensions, forward or the gradient of its input."""
    parameters = {
        "kernel_size": kernel_size,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": ceil_mode,
    }
    if backward:
        both = {"grad_output": "grad_output", "input": "input"}
        name = f"maxpool{ndim}d_bwd"
        return Operation(name, both, {"grad_input": "grad_input"}, parameters)
    return Operation(f"maxpool{ndim}d_fwd", {"input": "input"}, {"output": "output"}, parameters)
