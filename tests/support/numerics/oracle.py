"""What a request must answer: each operation's reference from its tensors and parameters.

Tensors are canonical (channels first); `expected` gives canonical references back, by the names of
the answer's tensors. The maxima's indices are exact and come as plain int64 arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.numerics import reference, reference_pool, reference_windows
from tests.support.numerics.bounds import U, rounded
from tests.support.numerics.reference import Reference
from tests.support.numerics.window_cases import unpool_size

Tensors = Mapping[str, NDArray[Any]]
Params = Mapping[str, Any]
Answer = dict[str, "Reference | NDArray[np.int64]"]

_GEOMETRY = ("stride", "padding", "dilation", "groups")
_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


# What rounding both factors of a product to TF32 costs, of the product.
TF32 = 2.0**-10


def _only(params: Params, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: params[name] for name in names if name in params}


def _spatial(size: Any, ndim: int) -> tuple[int, ...]:
    """A size given spatially or as a full channels-first shape."""
    return tuple(size)[-ndim:]


def _input_size(params: Params, grad_output: NDArray[Any], weight: NDArray[Any]) -> tuple[int, ...]:
    if params.get("input_size") is not None:
        return _spatial(params["input_size"], weight.ndim - 2)
    return reference.smallest_input_size(
        grad_output.shape[2:],
        weight.shape[2:],
        params.get("stride", 1),
        params.get("padding", 0),
        params.get("dilation", 1),
        params.get("output_padding", 0),
    )


def _finished(grad: Reference, tensors: Tensors, params: Params) -> Reference:
    """With the epilogue, where there is one."""
    accumulate = tensors.get("accumulate")
    if accumulate is None and "alpha" not in params:
        return grad
    beta = params.get("beta")
    return reference.epilogue(
        grad, params.get("alpha", 1.0), 1.0 if beta is None else beta, accumulate
    )


def _conv_fwd(t: Tensors, params: Params) -> Answer:
    geometry = _only(params, _GEOMETRY)
    return {"output": reference.conv_fwd(t["input"], t["weight"], t.get("bias"), **geometry)}


def _conv_bwd_data(t: Tensors, params: Params) -> Answer:
    size = _input_size(params, t["grad_output"], t["weight"])
    grad = reference.conv_bwd_data(t["grad_output"], t["weight"], size, **_only(params, _GEOMETRY))
    return {"grad_input": _finished(grad, t, params)}


def _grouped_conv_bwd_weight(t: Tensors, params: Params) -> Answer:
    kernel = _spatial(params["weight_size"], t["input"].ndim - 2)
    grad = reference.conv_bwd_weight(
        t["input"], t["grad_output"], kernel, **_only(params, _GEOMETRY)
    )
    both: Answer = {
        "grad_weight": _finished(grad, t, params),
        "grad_bias": reference.grad_bias(t["grad_output"]),
    }
    return {name: both[name] for name in params.get("outputs", ("grad_weight",))}


def _conv_backward(t: Tensors, params: Params) -> Answer:
    geometry = _only(params, _GEOMETRY)
    dy, x, w = t["grad_output"], t["input"], t["weight"]
    made: dict[str, Callable[[], Reference]] = {
        "grad_input": lambda: reference.conv_bwd_data(dy, w, x.shape[2:], **geometry),
        "grad_weight": lambda: reference.conv_bwd_weight(x, dy, w.shape[2:], **geometry),
        "grad_bias": lambda: reference.grad_bias(dy),
    }
    return {name: made[name]() for name in params.get("outputs", tuple(made))}


def _conv_transpose_fwd(t: Tensors, params: Params) -> Answer:
    geometry = _only(params, (*_GEOMETRY, "output_padding"))
    return {"output": reference.conv_transpose(t["input"], t["weight"], t.get("bias"), **geometry)}


def _transposed_input_grad(
    dy: NDArray[Any], w: NDArray[Any], size: tuple[int, ...], params: Params
) -> Reference:
    """A convolution, of which rows that output_padding adds under a dilation are left away."""
    whole = reference.conv_fwd(dy, w, **_only(params, _GEOMETRY))
    rows = tuple(slice(0, extent) for extent in size)
    return whole.map(lambda a: a[(slice(None), slice(None), *rows)])


def _conv_transpose_backward(t: Tensors, params: Params) -> Answer:
    geometry = _only(params, _GEOMETRY)
    dy, x, w = t["grad_output"], t["input"], t["weight"]
    made: dict[str, Callable[[], Reference]] = {
        "grad_input": lambda: _transposed_input_grad(dy, w, x.shape[2:], params),
        "grad_weight": lambda: reference.conv_bwd_weight(dy, x, w.shape[2:], **geometry),
        "grad_bias": lambda: reference.grad_bias(dy),
    }
    return {name: made[name]() for name in params.get("outputs", tuple(made))}


def _double_backward(t: Tensors, params: Params, *, transposed: bool) -> Answer:
    geometry = _only(params, _GEOMETRY)
    dy, x, w = t["grad_output"], t["input"], t["weight"]
    ggx, ggw, ggb = (t.get(f"grad_grad_{name}") for name in ("input", "weight", "bias"))

    def forward(a: NDArray[Any], b: NDArray[Any]) -> Reference:
        if transposed:
            return reference.conv_bwd_data(a, b, dy.shape[2:], **geometry)
        return reference.conv_fwd(a, b, **geometry)

    def to_input(a: NDArray[Any]) -> Reference:
        if transposed:
            return _transposed_input_grad(dy, a, x.shape[2:], params)
        return reference.conv_bwd_data(dy, a, x.shape[2:], **geometry)

    def to_weight(a: NDArray[Any]) -> Reference:
        sides = (dy, a) if transposed else (a, dy)
        return reference.conv_bwd_weight(*sides, w.shape[2:], **geometry)

    def to_output() -> list[Reference]:
        parts = [] if ggx is None else [forward(ggx, w)]
        parts += [] if ggw is None else [forward(x, ggw)]
        return parts + ([] if ggb is None else [reference.of_bias(ggb, dy.shape)])

    made: dict[str, Callable[[], Reference]] = {
        "grad_grad_output": lambda: reference.total(dy.shape, to_output()),
        "grad_input": lambda: reference.total(x.shape, [] if ggw is None else [to_input(ggw)]),
        "grad_weight": lambda: reference.total(w.shape, [] if ggx is None else [to_weight(ggx)]),
    }
    return {name: made[name]() for name in params.get("outputs", tuple(made))}


def _conv_double_backward(t: Tensors, params: Params) -> Answer:
    return _double_backward(t, params, transposed=False)


def _conv_transpose_double_backward(t: Tensors, params: Params) -> Answer:
    return _double_backward(t, params, transposed=True)


def _conv3d_backprop_input(t: Tensors, params: Params) -> Answer:
    grad = reference.conv_bwd_data(
        t["grad_output"],
        t["weight"],
        _input_size(params, t["grad_output"], t["weight"]),
        **_only(params, _GEOMETRY),
    )
    if params.get("region") is not None:
        d, h = (slice(*params["region"].get(axis, (None,))) for axis in "dh")
        grad = grad.map(lambda a: a[:, :, d, h])
    return {"grad_input": grad}


def _whole(array: NDArray[Any]) -> bool:
    """Whether all are integers, so that nothing before the intermediate's rounding rounds."""
    value = array.astype(np.float64)
    return bool((np.isfinite(value) & (np.rint(value) == value)).all())


def _fused(t: Tensors, params: Params) -> Answer:
    dtype = t["input"].dtype
    u_accumulate = U["float64"] if dtype == np.float64 else U["float32"]
    whole = all(_whole(array) for array in t.values())
    exact = whole and "silu" not in (params.get("activation0"), params.get("activation1"))
    out = reference.fused(
        t["input"],
        t["weight0"],
        t["weight1"],
        t.get("bias0"),
        t.get("bias1"),
        conv0=params.get("conv0", {}),
        conv1=params.get("conv1", {}),
        activation0=params.get("activation0", "none"),
        activation1=params.get("activation1", "none"),
        round_intermediate=(lambda a: rounded(a, dtype)) if exact else None,
        u_intermediate=U[dtype.name],
        u_accumulate=u_accumulate,
        c_factors=TF32 if params.get("precision") == "high" else 0.0,
    )
    return {"output": out}


def _maxpool_fwd(t: Tensors, params: Params) -> Answer:
    output, indices = reference_pool.maxpool_fwd(t["input"], **_only(params, _POOLING))
    return {"output": _moved(output), "indices": indices}


def _maxpool_bwd(t: Tensors, params: Params) -> Answer:
    indices = t.get("indices")
    if indices is None:
        _, indices = reference_pool.maxpool_fwd(t["input"], **_only(params, _POOLING))
        size = t["input"].shape[2:]
    else:
        size = _spatial(params["input_size"], indices.ndim - 2)
    return {"grad_input": reference_pool.maxpool_bwd(t["grad_output"], indices, size)}


def _windows(params: Params, size: tuple[int, ...]) -> reference_windows.Windows:
    names = (*_POOLING, "count_include_pad")
    return reference_windows.sliding(size, **_only(params, names))


def _avg_pool_fwd(t: Tensors, params: Params) -> Answer:
    x = t["input"]
    windows = _windows(params, x.shape[2:])
    return {"output": reference_windows.avg_fwd(x, windows, params.get("divisor_override"))}


def _avg_pool_bwd(t: Tensors, params: Params) -> Answer:
    dy = t["grad_output"]
    size = _spatial(params["input_size"], dy.ndim - 2)
    divisor = params.get("divisor_override")
    return {"grad_input": reference_windows.avg_bwd(dy, _windows(params, size), size, divisor)}


def _adaptive_avg_pool_fwd(t: Tensors, params: Params) -> Answer:
    windows = reference_windows.adaptive(t["input"].shape[2:], params["output_size"])
    return {"output": reference_windows.avg_fwd(t["input"], windows)}


def _adaptive_avg_pool_bwd(t: Tensors, params: Params) -> Answer:
    dy = t["grad_output"]
    size = _spatial(params["input_size"], dy.ndim - 2)
    windows = reference_windows.adaptive(size, dy.shape[2:])
    return {"grad_input": reference_windows.avg_bwd(dy, windows, size)}


def _adaptive_max_pool_fwd(t: Tensors, params: Params) -> Answer:
    windows = reference_windows.adaptive(t["input"].shape[2:], params["output_size"])
    output, indices = reference_windows.max_fwd(t["input"], windows)
    return {"output": _moved(output), "indices": indices}


def _adaptive_max_pool_bwd(t: Tensors, params: Params) -> Answer:
    dy, indices = t["grad_output"], t.get("indices")
    if indices is None:
        size = t["input"].shape[2:]
        windows = reference_windows.adaptive(size, dy.shape[2:])
        _, indices = reference_windows.max_fwd(t["input"], windows)
    else:
        size = _spatial(params["input_size"], dy.ndim - 2)
    return {"grad_input": reference_pool.maxpool_bwd(dy, indices, size)}


def _max_unpool_fwd(t: Tensors, params: Params) -> Answer:
    size = unpool_size(t["input"].shape[2:], params)
    return {"output": _moved(reference_windows.unpool_fwd(t["input"], t["indices"], size))}


def _max_unpool_bwd(t: Tensors, params: Params) -> Answer:
    return {"grad_input": _moved(reference_windows.unpool_bwd(t["grad_output"], t["indices"]))}


def _moved(value: NDArray[Any]) -> Reference:
    """Elements of the input: right to the bit, so nothing is allowed to round."""
    value = value.astype(np.float64)
    return Reference(value, np.zeros_like(value), np.zeros(value.shape, np.int64))


ORACLES: dict[str, Callable[[Tensors, Params], Answer]] = {
    "conv_fwd": _conv_fwd,
    "conv_bwd_data": _conv_bwd_data,
    "grouped_conv_bwd_weight": _grouped_conv_bwd_weight,
    "conv_backward": _conv_backward,
    "conv_transpose_fwd": _conv_transpose_fwd,
    "conv_transpose_backward": _conv_transpose_backward,
    "conv_double_backward": _conv_double_backward,
    "conv_transpose_double_backward": _conv_transpose_double_backward,
    "conv3d_transpose": _conv_transpose_fwd,
    "conv3d_backprop_input": _conv3d_backprop_input,
    "grouped_conv_conv_fwd": _fused,
    **{f"maxpool{ndim}d_fwd": _maxpool_fwd for ndim in (1, 2, 3)},
    **{f"maxpool{ndim}d_bwd": _maxpool_bwd for ndim in (1, 2, 3)},
    "avg_pool_fwd": _avg_pool_fwd,
    "avg_pool_bwd": _avg_pool_bwd,
    "adaptive_avg_pool_fwd": _adaptive_avg_pool_fwd,
    "adaptive_avg_pool_bwd": _adaptive_avg_pool_bwd,
    "adaptive_max_pool_fwd": _adaptive_max_pool_fwd,
    "adaptive_max_pool_bwd": _adaptive_max_pool_bwd,
    "max_unpool_fwd": _max_unpool_fwd,
    "max_unpool_bwd": _max_unpool_bwd,
}


def expected(operation: str, tensors: Tensors, params: Params) -> Answer:
    """The reference of every output of a request, canonical in and out."""
    return ORACLES[operation](tensors, params)
