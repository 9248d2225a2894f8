"""The layers of a model, in the format of the server's ``--warm-up`` and of ``kernels tune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from convgrad.torch._ops import OPS
from convgrad.torch._tensors import dense, dtype_name, is_channels_last

__all__ = ["layers_of"]

_ATEN = torch.ops.aten
# The kind of each operator of pooling and its rank: None if the input, which then has a batch,
# determines it. PyTorch computes 1D pooling as that of images with one line.
_POOLS: Mapping[Any, tuple[str, int | None]] = {
    _ATEN.max_pool2d_with_indices: ("maxpool", 2),
    _ATEN.max_pool3d_with_indices: ("maxpool", 3),
    OPS.max_pool: ("maxpool", None),
    _ATEN.avg_pool2d: ("avg_pool", 2),
    _ATEN.avg_pool3d: ("avg_pool", 3),
    OPS.avg_pool: ("avg_pool", None),
    _ATEN._adaptive_avg_pool2d: ("adaptive_avg_pool", 2),
    _ATEN._adaptive_avg_pool3d: ("adaptive_avg_pool", 3),
    OPS.adaptive_avg_pool: ("adaptive_avg_pool", None),
    _ATEN.adaptive_max_pool2d: ("adaptive_max_pool", 2),
    _ATEN.adaptive_max_pool3d: ("adaptive_max_pool", 3),
    OPS.adaptive_max_pool: ("adaptive_max_pool", None),
}
# Their parameters after the input, as fields of a layer.
_WINDOW = ("kernel_size", "stride", "padding")
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "maxpool": (*_WINDOW, "dilation", "ceil_mode"),
    "avg_pool": (*_WINDOW, "ceil_mode", "count_include_pad"),
    "adaptive_avg_pool": ("output_size",),
    "adaptive_max_pool": ("output_size",),
}
_LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def layers_of(model: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, Any]:
    """Return the distinct convolutions and poolings that a model computes.

    The model is called once, in evaluation mode. With ``torch.device("meta")`` tensors nothing is
    computed::

        layers = convgrad.torch.layers_of(model, torch.randn(8, 3, 224, 224))
        Path("layers.json").write_text(json.dumps(layers))

    ``convgrad serve --warm-up layers.json`` compiles and runs their kernels before the server is
    ready, and ``convgrad kernels tune --layers layers.json`` finds the fastest configurations of
    the convolutions on your GPU.

    Parameters
    ----------
    model : callable
        A module, or a function of tensors.
    *inputs, **options
        Its arguments.

    Returns
    -------
    dict
        ``{"layers": [...]}``. Each layer has its ``batch``, ``dtype`` and ``layout`` (that in which
        PyTorch computes it), and ``count``, how often the model computes it.
    """
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    training = [module for module in modules if module.training]
    recorder = _Recorder()
    try:
        for module in training:
            module.training = False
        # Without gradients, 1D max pooling on a CPU is no operator that a mode sees.
        with torch.enable_grad(), recorder:
            model(*inputs, **options)
    finally:
        for module in training:
            module.training = True
    return {"layers": [fields | {"count": count} for fields, count in recorder.layers()]}


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the operators below autograd, where padding modes and autocast are resolved."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, tuple[dict[str, Any], int]] = {}

    def layers(self) -> list[tuple[dict[str, Any], int]]:
        """Return each layer's fields and how often it was computed, in order of first use."""
        return list(self._found.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator in (_ATEN.convolution, OPS.convolution):
            self._convolution(*args)
        elif operator is OPS.separable_convolution:
            self._separable(result, *args)
        elif operator in _POOLS:
            self._pooling(*_POOLS[operator], *args)
        return result

    def _separable(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        depthwise: torch.Tensor,
        pointwise: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        none, one, ndim = [0], [1], input.dim() - 2
        steps, channels = (stride, padding, dilation), input.shape[1]
        self._convolution(input, depthwise, None, *steps, False, none, channels)
        shape = *pointwise.shape[1:2], *output.shape[2:]
        between = output.new_empty((input.shape[0], *shape), device="meta")
        between = dense(between, ndim > 1 and is_channels_last(output))
        self._convolution(between, pointwise, bias, one, none, one, False, none, 1)

    def _convolution(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> None:
        ndim = input.dim() - 2
        if ndim not in _LAYOUTS:
            return
        more = {"output_padding": _each(output_padding, ndim)} if transposed else {}
        self._add(
            (input, weight),
            {
                "kind": "conv_transpose" if transposed else "conv",
                "ndim": ndim,
                "C": input.shape[1],
                "K": weight.shape[1] * groups if transposed else weight.shape[0],
                "groups": groups,
                "input_size": list(input.shape[2:]),
                "kernel_size": list(weight.shape[2:]),
                "stride": _each(stride, ndim),
                "padding": _each(padding, ndim),
                "dilation": _each(dilation, ndim),
                **more,
            },
        )

    def _pooling(self, kind: str, ndim: int | None, input: torch.Tensor, *values: Any) -> None:
        rank = ndim or input.dim() - 2
        whole = input.unsqueeze(0) if input.dim() == rank + 1 else input
        given = dict(zip(_PARAMETERS[kind], values, strict=False))  # defaults may be left out
        if not given.get("stride", True):
            del given["stride"]  # an empty list: the window's
        self._add(
            (whole,),
            {
                "kind": kind,
                "ndim": rank,
                "C": whole.shape[1],
                "input_size": list(whole.shape[2:]),
                **{
                    name: value if isinstance(value, bool) else _each(value, rank)
                    for name, value in given.items()
                },
            },
        )

    def _add(self, operands: Sequence[torch.Tensor], fields: dict[str, Any]) -> None:
        if any(each.numel() == 0 for each in operands):
            return  # nothing is computed
        fields |= {
            "batch": operands[0].shape[0],
            "dtype": dtype_name(operands[0].dtype),
            "layout": _LAYOUTS[fields["ndim"]][is_channels_last(*operands)],
        }
        key = str(fields)
        self._found[key] = fields, self._found.get(key, (fields, 0))[1] + 1


def _each(values: Sequence[int], ndim: int) -> list[int]:
    """Return a value for each dimension, of which PyTorch may have one for all."""
    return list(values) * ndim if len(values) == 1 else list(values)
