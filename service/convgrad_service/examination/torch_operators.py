"""The PyTorch operators that compute a problem, so that they can be timed on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from convgrad_service.problems import Problem
from convgrad_service.problems.reading import Steps
from convgrad_service.problems.sizes import per_dimension

Run = Callable[[], Any]


class NoOperator(Exception):
    """PyTorch cannot compute a problem; the message is the reason."""


def torch_operator(
    torch: Any, problem: Problem, parameters: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Run:
    """Return a function that computes the problem's outputs, in their order, by PyTorch.

    Parameters
    ----------
    torch
        The module.
    problem, parameters
        The problem, and the parameters of its request.
    tensors
        Inputs and outputs as PyTorch tensors in the request's layout. Outputs are not written;
        they only have shapes.

    Raises
    ------
    NoOperator
        PyTorch has no operator for the problem.
    """
    if getattr(problem, "weight_dtype", None) not in (None, problem.dtype):
        raise NoOperator("PyTorch's gradients have the dtype of the inputs")
    epilogue = getattr(problem, "epilogue", None)
    if epilogue is not None and not epilogue.trivial:
        raise NoOperator("PyTorch's operator has no epilogue")
    case = _Case(torch, problem, parameters, _channels_first(torch, problem, tensors))
    return _RUNS[problem.operation](case)


@dataclass(frozen=True)
class _Case:
    torch: Any
    problem: Any
    parameters: Mapping[str, Any]
    tensors: Mapping[str, Any]
    """By name, channels first."""

    @property
    def aten(self) -> Any:
        return self.torch.ops.aten

    def get(self, *names: str) -> Any:
        """Return the first of these tensors that exists; None if none does."""
        return next((self.tensors[name] for name in names if name in self.tensors), None)


def _channels_first(torch: Any, problem: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return views of the tensors with the channels as the second dimension."""
    found = {}
    for name, tensor in tensors.items():
        layout = _layout(problem, name)
        last = layout is not None and layout.endswith("C") and tensor.ndim > 2
        found[name] = torch.movedim(tensor, -1, 1) if last else tensor
    return found


def _layout(problem: Any, name: str) -> str | None:
    if hasattr(problem, "layout"):
        if problem.layout.grouped:
            raise NoOperator(f"PyTorch has no layout {problem.layout.name}")
        return str(problem.layout.name)
    formats = {
        "grad_output": problem.grad_output_format,
        "weight": problem.weight_format,
        "grad_input": problem.output_format,
    }
    found = str(formats[name].name)
    if found not in ("NCDHW", "NDHWC"):
        raise NoOperator(f"PyTorch has no format {found}")
    return found


# --- convolutions --------------------------------------------------------------------------------


def _conv(conv: Any, *, transposed: bool = False) -> tuple[Any, ...]:
    """Return stride, padding, dilation, transposed, output_padding and groups.

    PyTorch takes the same padding on both sides. Padding after the last window does not matter, so
    it suffices that the sizes are PyTorch's; a transposed convolution has output_padding for it.
    """
    padding = [before for before, _ in conv.padding]
    rows = zip(
        conv.input_size,
        conv.output_size,
        conv.kernel_size,
        conv.stride,
        padding,
        conv.dilation,
        strict=True,
    )
    # The rows of x beyond the smallest x that has as many windows as y has rows.
    extra = [x - ((y - 1) * s - 2 * p + d * (k - 1) + 1) for x, y, k, s, p, d in rows]
    limits = [
        max(s, d) if transposed else s for s, d in zip(conv.stride, conv.dilation, strict=True)
    ]
    if not all(0 <= each < limit for each, limit in zip(extra, limits, strict=True)):
        raise NoOperator("PyTorch takes the same padding on both sides")
    output_padding = extra if transposed else [0] * len(extra)
    return list(conv.stride), padding, list(conv.dilation), transposed, output_padding, conv.groups


def _is_transposed(case: _Case) -> bool:
    return "transpose" in case.problem.operation


def _forward(case: _Case) -> Run:
    steps = _conv(case.problem.conv, transposed=_is_transposed(case))
    x, w, bias = (case.get(name) for name in ("input", "weight", "bias"))
    return lambda: case.aten.convolution(x, w, bias, *steps)


def _gradients(case: _Case) -> Run:
    conv, made = case.problem.conv, case.problem.outputs
    if getattr(case.problem, "region", None) is not None:
        raise NoOperator("PyTorch computes whole gradients, not regions")
    steps = _conv(conv, transposed=_is_transposed(case))
    y = case.get("grad_output")
    if set(made) == {"grad_bias"}:
        return lambda: y.sum([0, *range(2, y.ndim)])
    # Of an operand that is not read only the shape matters.
    x, w = case.get("input", "grad_input"), case.get("weight", "grad_weight")
    channels = conv.in_channels if _is_transposed(case) else conv.out_channels
    wanted = [name in made for name in ("grad_input", "grad_weight", "grad_bias")]
    bias = [channels] if wanted[2] else None
    return lambda: _made(case.aten.convolution_backward(y, x, w, bias, *steps, wanted))


def _second_gradients(case: _Case) -> Run:
    steps = _conv(case.problem.conv, transposed=_is_transposed(case))
    names = ("grad_grad_input", "grad_grad_weight", "grad_grad_bias")
    firsts = [case.get(name) for name in names]
    y, w, x = (case.get(name) for name in ("grad_output", "weight", "input"))
    made = case.problem.outputs
    wanted = [name in made for name in ("grad_grad_output", "grad_input", "grad_weight")]
    double_backward = case.aten._convolution_double_backward
    if y is None or x is None or w is None:
        raise NoOperator("PyTorch's operator needs all three operands")
    return lambda: _made(double_backward(*firsts, y, w, x, *steps, wanted))


def _two_convolutions(case: _Case) -> Run:
    problem, functional = case.problem, case.torch.nn.functional
    first, second = _conv(problem.conv0), _conv(problem.conv1)
    x, w0, w1 = (case.get(name) for name in ("input", "weight0", "weight1"))
    bias0, bias1 = case.get("bias0"), case.get("bias1")
    activations = {
        "none": lambda y: y,
        "relu": functional.relu_,
        "relu6": functional.relu6,
        "silu": functional.silu,
    }
    between, after = activations[problem.activation0], activations[problem.activation1]

    def run() -> Any:
        y = between(case.aten.convolution(x, w0, bias0, *first))
        return after(case.aten.convolution(y, w1, bias1, *second))

    return run


def _made(outputs: Any) -> Any:
    return tuple(each for each in outputs if each is not None)


# --- pooling -------------------------------------------------------------------------------------


def _even(padding: Any) -> list[int]:
    if any(before != after for before, after in padding):
        raise NoOperator("PyTorch takes the same padding on both sides")
    return [before for before, _ in padding]


class _Pool:
    """A pooling's tensors and parameters; 1D as 2D of height 1, as in PyTorch itself."""

    def __init__(self, case: _Case) -> None:
        self.case, self.aten = case, case.aten
        given = case.get("input", "grad_output")
        ndim = given.ndim - 2
        self.ndim = max(ndim, 2)
        lift = ndim == 1
        self.tensors = {
            name: tensor.unsqueeze(2) if lift else tensor for name, tensor in case.tensors.items()
        }
        if "indices" in self.tensors:
            self.tensors["indices"] = self.tensors["indices"].long()
        self._lifted = [1] if lift else []
        self._own_ndim = ndim

    def get(self, name: str) -> Any:
        return self.tensors[name]

    @property
    def input(self) -> Any:
        """The input; where it is not read, a tensor of its shape."""
        return self.tensors.get("input", self.tensors.get("grad_input"))

    def operator(self, name: str) -> Any:
        return getattr(self.aten, name.format(self.ndim))

    def size(self, name: str) -> list[int]:
        return list(self.tensors[name].shape[2:])

    def windows(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return kernel size, stride, padding and dilation."""
        said, ndim = self.case.parameters, self._own_ndim
        kernel = list(per_dimension("kernel_size", said["kernel_size"], ndim))
        stated = [said.get(name) for name in ("stride", "padding", "dilation")]
        stride = kernel if stated[0] is None else stated[0]
        steps = Steps.checked(stride, stated[1] or 0, stated[2] or 1, ndim)
        one, padding = self._lifted, _even(steps.padding)
        return (
            one + kernel,
            one + list(steps.stride),
            [0] * len(one) + padding,
            one + list(steps.dilation),
        )

    @property
    def ceil_mode(self) -> bool:
        return bool(self.case.parameters.get("ceil_mode", False))

    def averaging(self) -> tuple[Any, ...]:
        """Return the arguments of an average pooling after its tensors."""
        said = self.case.parameters
        kernel, stride, padding, _ = self.windows()
        divisor = said.get("divisor_override")
        counts = said.get("count_include_pad", True)
        return kernel, stride, padding, self.ceil_mode, counts, divisor


def _max_pool(case: _Case) -> Run:
    pool = _Pool(case)
    arguments = pool.get("input"), *pool.windows(), pool.ceil_mode
    if "indices" in case.problem.outputs:
        both = pool.operator("max_pool{}d_with_indices")
        return lambda: both(*arguments)
    function = getattr(case.torch.nn.functional, f"max_pool{pool.ndim}d")
    return lambda: function(*arguments)


def _max_pool_backward(case: _Case) -> Run:
    pool = _Pool(case)
    arguments = *pool.windows(), pool.ceil_mode
    y, x, indices = pool.get("grad_output"), pool.input, pool.tensors.get("indices")
    if indices is None:
        _, indices = pool.operator("max_pool{}d_with_indices")(x, *arguments)
    backward = pool.operator("max_pool{}d_with_indices_backward")
    return lambda: backward(y, x, *arguments, indices)


def _avg_pool(case: _Case) -> Run:
    pool = _Pool(case)
    function, x, arguments = pool.operator("avg_pool{}d"), pool.get("input"), pool.averaging()
    return lambda: function(x, *arguments)


def _avg_pool_backward(case: _Case) -> Run:
    pool = _Pool(case)
    y, x, arguments = pool.get("grad_output"), pool.input, pool.averaging()
    backward = pool.operator("avg_pool{}d_backward")
    return lambda: backward(y, x, *arguments)


def _adaptive(case: _Case) -> Run:
    pool = _Pool(case)
    name = "max" if "max" in case.problem.operation else "avg"
    function = getattr(case.torch.nn.functional, f"adaptive_{name}_pool{pool.ndim}d")
    more = [True] if "indices" in case.problem.outputs else []
    x, size = pool.get("input"), pool.size("output")
    return lambda: function(x, size, *more)


def _adaptive_avg_backward(case: _Case) -> Run:
    pool = _Pool(case)
    y, x = pool.get("grad_output"), pool.input
    backward = pool.operator("_adaptive_avg_pool{}d_backward")
    return lambda: backward(y, x)


def _adaptive_max_backward(case: _Case) -> Run:
    pool = _Pool(case)
    y, x, indices = pool.get("grad_output"), pool.input, pool.tensors.get("indices")
    if indices is None:
        size = pool.size("grad_output")
        _, indices = pool.operator("adaptive_max_pool{}d")(x, size)
    backward = pool.operator("adaptive_max_pool{}d_backward")
    return lambda: backward(y, x, indices)


def _unpool(case: _Case) -> Run:
    pool = _Pool(case)
    x, indices, size = pool.get("input"), pool.get("indices"), pool.size("output")
    if pool.ndim == 2:
        return lambda: pool.aten.max_unpool2d(x, indices, size)
    _, stride, padding, _ = pool.windows()
    return lambda: pool.aten.max_unpool3d(x, indices, size, stride, padding)


def _unpool_backward(case: _Case) -> Run:
    """PyTorch's gradient of an unpooling gathers."""
    y, indices = (case.get(name) for name in ("grad_output", "indices"))
    indices = indices.long()
    return lambda: y.flatten(2).gather(2, indices.flatten(2)).view(indices.shape)


_RUNS: Mapping[str, Callable[[_Case], Run]] = {
    **dict.fromkeys(("conv_fwd", "conv_transpose_fwd", "conv3d_transpose"), _forward),
    **dict.fromkeys(
        (
            "conv_bwd_data",
            "grouped_conv_bwd_weight",
            "conv_backward",
            "conv3d_backprop_input",
            "conv_transpose_backward",
        ),
        _gradients,
    ),
    "conv_double_backward": _second_gradients,
    "conv_transpose_double_backward": _second_gradients,
    "grouped_conv_conv_fwd": _two_convolutions,
    **{f"maxpool{ndim}d_fwd": _max_pool for ndim in (1, 2, 3)},
    **{f"maxpool{ndim}d_bwd": _max_pool_backward for ndim in (1, 2, 3)},
    "avg_pool_fwd": _avg_pool,
    "avg_pool_bwd": _avg_pool_backward,
    "adaptive_avg_pool_fwd": _adaptive,
    "adaptive_max_pool_fwd": _adaptive,
    "adaptive_avg_pool_bwd": _adaptive_avg_backward,
    "adaptive_max_pool_bwd": _adaptive_max_backward,
    "max_unpool_fwd": _unpool,
    "max_unpool_bwd": _unpool_backward,
}
