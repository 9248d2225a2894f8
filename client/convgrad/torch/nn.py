"""Modules of ``torch.nn`` that compute forward and backward with `convgrad.torch`'s functions.

They are subclasses with the same constructors, parameters and state dicts; `replace` converts the
modules of an existing model.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import nn

import convgrad.torch._functional as conv
import convgrad.torch._pool_functional as pool

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
    "replace",
]

Tensor: TypeAlias = torch.Tensor
Module = TypeVar("Module", bound=nn.Module)
# The mixins below are combined with modules of torch.nn, which have the attributes they read.
_Mixin: Any = nn.Module if TYPE_CHECKING else object


class _Conv(_Mixin):
    function: ClassVar[Callable[..., Tensor]]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            pads = self._reversed_padding_repeated_twice
            input, padding = nn.functional.pad(input, pads, mode=self.padding_mode), 0
        geometry = self.stride, padding, self.dilation, self.groups
        return self.function(input, weight, bias, *geometry)


class _ConvTranspose(_Mixin):
    function: ClassVar[Callable[..., Tensor]]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """As the module of torch.nn."""
        window = self.stride, self.padding, self.kernel_size
        ndim = len(self.kernel_size)
        extra = self._output_padding(input, output_size, *window, ndim, self.dilation)
        geometry = self.stride, self.padding, extra, self.groups, self.dilation
        return self.function(input, self.weight, self.bias, *geometry)


class _MaxPool(_Mixin):
    function: ClassVar[Callable[..., Tensor]]

    def forward(self, input: Tensor) -> Any:
        """As the module of torch.nn."""
        window = self.kernel_size, self.stride, self.padding, self.dilation
        return self.function(input, *window, self.ceil_mode, self.return_indices)


class _AvgPool(_Mixin):
    function: ClassVar[Callable[..., Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        """As the module of torch.nn."""
        window = self.kernel_size, self.stride, self.padding
        divisor = getattr(self, "divisor_override", None)  # AvgPool1d has none
        return self.function(input, *window, self.ceil_mode, self.count_include_pad, divisor)


class _AdaptiveAvgPool(_Mixin):
    function: ClassVar[Callable[..., Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        """As the module of torch.nn."""
        return self.function(input, self.output_size)


class _AdaptiveMaxPool(_Mixin):
    function: ClassVar[Callable[..., Any]]

    def forward(self, input: Tensor) -> Any:
        """As the module of torch.nn."""
        return self.function(input, self.output_size, self.return_indices)


class _MaxUnpool(_Mixin):
    function: ClassVar[Callable[..., Tensor]]

    def forward(
        self, input: Tensor, indices: Tensor, output_size: list[int] | None = None
    ) -> Tensor:
        """As the module of torch.nn."""
        window = self.kernel_size, self.stride, self.padding
        return self.function(input, indices, *window, output_size)


class Conv1d(_Conv, nn.Conv1d):
    function = staticmethod(conv.conv1d)


class Conv2d(_Conv, nn.Conv2d):
    function = staticmethod(conv.conv2d)


class Conv3d(_Conv, nn.Conv3d):
    function = staticmethod(conv.conv3d)


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    function = staticmethod(conv.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    function = staticmethod(conv.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    function = staticmethod(conv.conv_transpose3d)


class MaxPool1d(_MaxPool, nn.MaxPool1d):
    function = staticmethod(conv.max_pool1d)


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    function = staticmethod(conv.max_pool2d)


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    function = staticmethod(conv.max_pool3d)


class AvgPool1d(_AvgPool, nn.AvgPool1d):
    function = staticmethod(pool.avg_pool1d)


class AvgPool2d(_AvgPool, nn.AvgPool2d):
    function = staticmethod(pool.avg_pool2d)


class AvgPool3d(_AvgPool, nn.AvgPool3d):
    function = staticmethod(pool.avg_pool3d)


class AdaptiveAvgPool1d(_AdaptiveAvgPool, nn.AdaptiveAvgPool1d):
    function = staticmethod(pool.adaptive_avg_pool1d)


class AdaptiveAvgPool2d(_AdaptiveAvgPool, nn.AdaptiveAvgPool2d):
    function = staticmethod(pool.adaptive_avg_pool2d)


class AdaptiveAvgPool3d(_AdaptiveAvgPool, nn.AdaptiveAvgPool3d):
    function = staticmethod(pool.adaptive_avg_pool3d)


class AdaptiveMaxPool1d(_AdaptiveMaxPool, nn.AdaptiveMaxPool1d):
    function = staticmethod(pool.adaptive_max_pool1d)


class AdaptiveMaxPool2d(_AdaptiveMaxPool, nn.AdaptiveMaxPool2d):
    function = staticmethod(pool.adaptive_max_pool2d)


class AdaptiveMaxPool3d(_AdaptiveMaxPool, nn.AdaptiveMaxPool3d):
    function = staticmethod(pool.adaptive_max_pool3d)


class MaxUnpool1d(_MaxUnpool, nn.MaxUnpool1d):
    function = staticmethod(pool.max_unpool1d)


class MaxUnpool2d(_MaxUnpool, nn.MaxUnpool2d):
    function = staticmethod(pool.max_unpool2d)


class MaxUnpool3d(_MaxUnpool, nn.MaxUnpool3d):
    function = staticmethod(pool.max_unpool3d)


_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    getattr(nn, name): globals()[name] for name in __all__ if name != "replace"
}


def replace(model: Module) -> Module:
    """Convert a model's convolutions and poolings into this module's, in place.

    Parameters, buffers and hooks stay the same objects. Modules of subclasses are not converted.

    Parameters
    ----------
    model : torch.nn.Module
        Any model; also a single module.

    Returns
    -------
    torch.nn.Module
        ``model``.
    """
    for module in model.modules():
        replacement = _REPLACEMENTS.get(type(module))
        if replacement is not None:
            module.__class__ = replacement
    return model
