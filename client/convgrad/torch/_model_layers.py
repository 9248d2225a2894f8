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
# PyTorch computes 1D max pooling as that of images with one line.
_POOLS: Mapping[Any, int | None] = {
    _ATEN.max_pool2d_with_indices: 2,
    _ATEN.max_pool3d_with_indices: 3,
    OPS.max_pool: None,  # as the input, which has a batch
}
_LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def layers_of(model: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, Any]:
    """Return the distinct convolutions and max poolings that a model computes.

    The model is called once, in evaluation mode. With ``torch.device("meta")`` tensors nothing is
    computed::

        layers = convgrad.torch.layers_of(model, torch.randn(8, 3, 224, 224))
        Path("layers.json").write_text(json.dumps(layers))

    ``convgrad serve --warm-up layers.json`` compiles and runs their kernels before the server is
    ready, and ``convgrad kernels tune --layers layers.json`` finds their fastest configurations on
    your GPU. Transposed convolutions and other poolings are left out.

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
            output = result[0] if isinstance(result, tuple) else result
            self._pooling(_POOLS[operator] or output.dim() - 2, output, *args)
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
        if transposed or ndim not in _LAYOUTS:
            return
        self._add(
            (input, weight),
            {
                "kind": "conv",
                "ndim": ndim,
                "C": input.shape[1],
                "K": weight.shape[0],
                "groups": groups,
                "input_size": list(input.shape[2:]),
                "kernel_size": list(weight.shape[2:]),
                "stride": _each(stride, ndim),
                "padding": _each(padding, ndim),
                "dilation": _each(dilation, ndim),
            },
        )

    def _pooling(
        self,
        ndim: int,
        output: torch.Tensor,
        input: torch.Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> None:
        if input.dim() == ndim + 1:
            input, output = input.unsqueeze(0), output.unsqueeze(0)
        windows = _each(kernel, ndim)
        strides = _each(stride, ndim) if stride else windows
        befores, dilations = _each(padding, ndim), _each(dilation, ndim)
        # With ceil_mode, the last window may reach beyond the padding.
        afters = [
            max(before, (out - 1) * step + apart * (window - 1) + 1 - size - before)
            for before, out, step, apart, window, size in zip(
                befores, output.shape[2:], strides, dilations, windows, input.shape[2:], strict=True
            )
        ]
        self._add(
            (input,),
            {
                "kind": "maxpool",
                "ndim": ndim,
                "C": input.shape[1],
                "input_size": list(input.shape[2:]),
                "kernel_size": windows,
                "stride": strides,
                "padding": [list(pair) for pair in zip(befores, afters, strict=True)],
                "dilation": dilations,
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
