"""PyTorch's tensors in the contract's terms: dtypes, memory formats, NumPy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "DTYPES",
    "INDICES",
    "contract_layout",
    "contract_order",
    "dense",
    "is_channels_last",
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
"""The dtypes that the operations take, and the contract's names for them."""

INDICES = {torch.int64: "int64", torch.int32: "int32"}
"""Those of indices of maxima."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_LAYOUTS = {4: "NHWC", 5: "NDHWC"}
_TO_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_TO_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


def is_channels_last(*tensors: torch.Tensor) -> bool:
    """Whether some tensor is in a channels-last memory format and not contiguous as well: what
    PyTorch's own convolutions go by."""
    return any(
        tensor.dim() in _FORMATS
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])
        for tensor in tensors
    )


def dense(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """The tensor in that memory format: itself, or a copy."""
    if channels_last and tensor.dim() in _FORMATS:
        return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])
    return tensor.contiguous()


def contract_layout(rank: int, channels_last: bool) -> dict[str, str]:
    """The field ``layout`` of a request, left out where it is the default."""
    return {"layout": _LAYOUTS[rank]} if channels_last else {}


def contract_order(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """A contiguous view whose dimensions are in the order of the request's layout."""
    return tensor.permute(_TO_LAST[tensor.dim()]) if channels_last and tensor.dim() > 1 else tensor


def torch_order(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """The inverse of `contract_order`."""
    return tensor.permute(_TO_FIRST[tensor.dim()]) if channels_last and tensor.dim() > 1 else tensor


def uses_tf32(tensor: torch.Tensor) -> bool:
    """Whether PyTorch's own convolutions would use TF32 for such a tensor."""
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cuda"
        and bool(torch.backends.cudnn.allow_tf32)
    )


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's elements on the host: a view where it lies there; bfloat16 is ml_dtypes' own."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        words: NDArray[Any] = host.view(torch.int16).numpy()
        return words.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = host.numpy()
    return array


def to_torch(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array's elements as a tensor on a device."""
    own = array if array.flags.writeable else array.copy()
    if own.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(own).to(device)
