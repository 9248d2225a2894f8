"""The backend protocol, and the operations of the contract that compute a layer's passes."""

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
    "convolution_double_backward",
    "max_pool",
    "named",
]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution's geometry, one value per spatial dimension, as ATen's operators take it."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @classmethod
    def of(cls, values: Sequence[Any], ndim: int) -> Geometry:
        """Make one from ATen's arguments, which hold one value per dimension or one for all."""
        stride, padding, dilation, groups, transposed, output_padding = values
        stride, padding, dilation, output_padding = (
            each * ndim if len(each) == 1 else each
            for each in (stride, padding, dilation, output_padding)
        )
        return cls(stride, padding, dilation, groups, transposed, output_padding)

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields of a request that state the geometry."""
        more = {"output_padding": self.output_padding} if self.transposed else {}
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            **more,
        }

    def operation(self, name: str) -> str:
        """Return ``conv_<name>`` or ``conv_transpose_<name>``."""
        return f"conv_transpose_{name}" if self.transposed else f"conv_{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the contract on a layer's tensors.

    ``inputs`` and ``outputs`` map the contract's tensor names to the layer's (``input``,
    ``weight``, ``grad_input``, …).
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """An operation prepared for tensors of certain shapes, dtypes and device.

    It may have an attribute ``faster_peer``, a sentence: PyTorch's own kernel was measured to be
    faster, so that `use` leaves the operation to it.
    """

    @property
    def kernel(self) -> str:
        """The name of the kernel that the last call used."""
        ...

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute the operation.

        Parameters
        ----------
        tensors : sequence of Tensor
            The tensors of ``operation.inputs``, in that order, with PyTorch's order of dimensions:
            all contiguous, or all in a channels-last memory format.

        Returns
        -------
        sequence of Tensor
            The tensors of ``operation.outputs``, in that order and in the same memory format.

        Raises
        ------
        convgrad.ConvgradError
            The backend failed, or a server could not be reached.
        """
        ...


class Backend(Protocol):
    """Computes operations on tensors. Safe to call from several threads.

    It may have an attribute ``forward_devices``, the types of devices, such as ``"cuda"``, on which
    `use` gives it the forward passes of poolings too. Without it PyTorch computes them.
    """

    name: str

    def prepare(
        self, operation: Operation, tensors: Sequence[torch.Tensor], *, channels_last: bool
    ) -> Runner:
        """Prepare an operation for tensors of these shapes, dtypes and device.

        Parameters
        ----------
        operation : Operation
            What to compute.
        tensors : sequence of Tensor
            As `Runner` takes them; their elements are not read.
        channels_last : bool
            Whether they are in a channels-last memory format.

        Raises
        ------
        convgrad.ConvgradError
            The backend refuses the operation.
        """
        ...


def convolution(geometry: Geometry, *, bias: bool) -> Operation:
    """Return the forward pass, which computes ``output`` from ``input``, ``weight``, ``bias``."""
    names = ("input", "weight", "bias") if bias else ("input", "weight")
    return Operation(
        geometry.operation("fwd"), named(names), {"output": "output"}, geometry.parameters
    )


def convolution_backward(
    geometry: Geometry,
    wanted: tuple[str, ...],
    input_size: tuple[int, ...],
    kernel_size: tuple[int, ...],
) -> Operation:
    """Return the backward pass that computes the ``wanted`` gradients.

    These are some of ``grad_input``, ``grad_weight`` and ``grad_bias``. The operation takes only
    the tensors that these need, unless the convolution is transposed.
    """
    parameters, outputs = geometry.parameters, named(wanted)
    asked = {"outputs": list(wanted)}
    if not geometry.transposed and wanted == ("grad_input",):
        both = named(("grad_output", "weight"))
        to_input = {**parameters, "input_size": input_size}
        return Operation("conv_bwd_data", both, outputs, to_input)
    if not geometry.transposed and "grad_input" not in wanted:
        both = named(("input", "grad_output"))
        of_weight = {**parameters, "weight_size": kernel_size, **asked}
        return Operation("grouped_conv_bwd_weight", both, outputs, of_weight)
    every = named(("grad_output", "input", "weight"))
    return Operation(geometry.operation("backward"), every, outputs, {**parameters, **asked})


def convolution_double_backward(
    geometry: Geometry, given: tuple[str, ...], wanted: tuple[str, ...]
) -> Operation:
    """Return the double backward pass that computes the ``wanted`` gradients.

    ``given`` names the incoming gradients: some of ``grad_grad_input``, ``grad_grad_weight`` and
    ``grad_grad_bias``.
    """
    names = ("grad_output", "input", "weight", *given)
    parameters = {**geometry.parameters, "outputs": list(wanted)}
    name = geometry.operation("double_backward")
    return Operation(name, named(names), named(wanted), parameters)


def named(names: tuple[str, ...]) -> dict[str, str]:
    """Map each name to itself: here the contract's names are the layer's."""
    return {name: name for name in names}


def max_pool(
    ndim: int,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    wanted: tuple[str, ...],
) -> Operation:
    """Return max pooling in one to three dimensions, forward or backward.

    ``wanted`` is output, output and indices, or grad_input.
    """
    parameters: dict[str, Any] = {
        "kernel_size": kernel_size,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": ceil_mode,
    }
    if "grad_input" in wanted:
        both = named(("grad_output", "input"))
        return Operation(f"maxpool{ndim}d_bwd", both, named(wanted), parameters)
    if "indices" in wanted:
        parameters["return_indices"] = True
    return Operation(f"maxpool{ndim}d_fwd", named(("input",)), named(wanted), parameters)
