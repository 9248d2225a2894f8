"""Conversion between PyTorch's dtypes, memory formats and tensors and the contract's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad

__all__ = [
    "DTYPES",
    "INDICES",
    "contract_layout",
    "contract_order",
    "dense",
    "dtype_name",
    "gather_maxima",
    "is_channels_last",
    "is_forward_mode",
    "is_transformed",
    "scatter_maxima",
    "to_numpy",
    "to_torch",
    "torch_order",
    "uses_tf32",
]

DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""The floating dtypes of the contract, with its names for them."""

INDICES = {torch.int64: "int64", torch.int32: "int32"}
"""The dtypes of the indices of maxima."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_LAYOUTS = {4: "NHWC", 5: "NDHWC"}
_TO_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_TO_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the contract's name, or PyTorch's for a dtype that is not of the contract."""
    return DTYPES.get(dtype, str(dtype))


def is_channels_last(*tensors: torch.Tensor) -> bool:
    """Return whether any tensor is channels last, or a part of one, and not also contiguous.

    PyTorch's convolutions choose their memory format by the same rule.
    """
    return any(
        tensor.dim() in _FORMATS and not tensor.is_contiguous() and _is_like_last(tensor)
        for tensor in tensors
    )


def _is_like_last(tensor: torch.Tensor) -> bool:
    """Return whether the order of the strides is channels last, as ATen decides it."""
    strides: tuple[int, ...] = tensor.stride()
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        # Of an image of one pixel and one channel, either order is possible.
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(tensor.shape[dim], 1)
    return bool(strides[1])


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active, functorch's included."""
    return bool(forward_ad._current_level >= 0)


def is_transformed() -> bool:
    """Return whether a transform of functorch, or forward-mode differentiation, is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or is_forward_mode()


def dense(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return the tensor in a memory format; a copy unless it is in it already."""
    if channels_last and tensor.dim() in _FORMATS:
        return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])
    return tensor.contiguous()


def contract_layout(rank: int, channels_last: bool) -> dict[str, str]:
    """Return the field ``layout`` of a request, or nothing for the default layout."""
    return {"layout": _LAYOUTS[rank]} if channels_last else {}


def contract_order(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return a contiguous view with the dimensions in the order of the request's layout."""
    return tensor.permute(_TO_LAST[tensor.dim()]) if channels_last and tensor.dim() > 1 else tensor


def torch_order(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Invert `contract_order`."""
    return tensor.permute(_TO_FIRST[tensor.dim()]) if channels_last and tensor.dim() > 1 else tensor


def uses_tf32(tensor: torch.Tensor) -> bool:
    """Return whether PyTorch's convolutions would use TF32 for this tensor."""
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cuda"
        and bool(torch.backends.cudnn.allow_tf32)
    )


def gather_maxima(planes: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the elements at the indices, each of which counts within its plane, in their shape."""
    # `reshape`, because `flatten` has no rule for gradients in batches; -1 would be ambiguous for
    # an empty batch.
    flat = [each.reshape(*each.shape[:2], math.prod(each.shape[2:])) for each in (planes, indices)]
    return flat[0].gather(2, flat[1].long()).reshape(indices.shape)


def scatter_maxima(
    values: torch.Tensor, indices: torch.Tensor, size: Sequence[int]
) -> torch.Tensor:
    """Invert `gather_maxima`, for planes of ``size``: indices may repeat, and their values add."""
    dims = values.dim() - len(size)
    outer = values.shape[:dims]
    flat = [each.reshape(*outer, math.prod(each.shape[dims:])) for each in (values, indices)]
    planes = values.new_zeros((*outer, math.prod(size)))
    return planes.scatter_add(-1, flat[1].long(), flat[0]).reshape(*outer, *size)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as an array: a view if it is on the host, with ml_dtypes' bfloat16."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        words: NDArray[Any] = host.view(torch.int16).numpy()
        return words.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = host.numpy()
    return array


def to_torch(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; a view if both are on the host."""
    own = array if array.flags.writeable else array.copy()
    if own.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(own).to(device)
