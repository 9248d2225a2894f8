"""The functions of `convgrad.torch` compared with PyTorch's: forward, backward, double backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import convgrad.torch as ours
from convgrad import InvalidProblem
from tests.support.torch_tensors import TOLERANCE, Tensor, normal, same

functional = torch.nn.functional

CONVS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": (1, (2, 6, 20), (8, 6, 5), {"stride": 2, "padding": 2}),
    "2d": (2, (2, 6, 9, 11), (8, 6, 3, 3), {"padding": 1}),
    "2d strided": (2, (2, 6, 9, 11), (8, 6, 3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    "2d dilated": (2, (1, 4, 12, 12), (6, 4, 3, 3), {"dilation": 2, "padding": 2}),
    "2d grouped": (2, (2, 8, 7, 7), (12, 4, 3, 3), {"groups": 2, "padding": 1}),
    "2d depthwise": (2, (2, 6, 8, 8), (6, 1, 3, 3), {"groups": 6, "stride": 2, "padding": 1}),
    "2d same": (2, (2, 4, 8, 9), (6, 4, 4, 3), {"padding": "same"}),
    "2d valid": (2, (2, 4, 8, 9), (6, 4, 4, 3), {"padding": "valid"}),
    "3d": (3, (1, 4, 5, 6, 7), (6, 4, 3, 3, 3), {"padding": 1}),
    "2d unbatched": (2, (6, 9, 11), (8, 6, 3, 3), {"padding": 1}),
}
TRANSPOSED: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": (1, (2, 6, 9), (6, 4, 4), {"stride": 2, "padding": 1}),
    "2d": (2, (2, 6, 5, 6), (6, 4, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "2d grouped": (2, (2, 6, 5, 6), (6, 4, 3, 3), {"stride": 3, "groups": 2, "dilation": 2}),
    "3d": (3, (1, 4, 3, 4, 3), (4, 6, 2, 2, 2), {"stride": 2}),
}
POOLS: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "2d": (2, (2, 5, 9, 10), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "2d ceil": (2, (2, 5, 9, 10), {"kernel_size": (3, 2), "ceil_mode": True}),
    "2d unbatched": (2, (5, 9, 10), {"kernel_size": 2}),
    "3d": (3, (1, 3, 5, 6, 7), {"kernel_size": 3, "stride": 2, "padding": 1}),
}


@pytest.fixture(autouse=True)
def _on(backend: ours.Backend) -> Iterator[None]:
    with ours.use(backend):
        yield


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_convolutions_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ndim, of_input, of_weight, options = CONVS[name]
    inputs = normal(of_input, dtype), normal(of_weight, dtype), normal(of_weight[:1], dtype)
    output = getattr(ours, f"conv{ndim}d")(*inputs, **options)
    with ours.use(None):
        wanted = getattr(functional, f"conv{ndim}d")(*inputs, **options)
        grad = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, inputs, grad)
    same([output], [wanted], dtype)
    same(torch.autograd.grad(output, inputs, grad), gradients, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ndim, of_input, of_weight, options = TRANSPOSED[name]
    channels = of_weight[1] * options.get("groups", 1)
    inputs = normal(of_input, dtype), normal(of_weight, dtype), normal((channels,), dtype)
    output = getattr(ours, f"conv_transpose{ndim}d")(*inputs, **options)
    with ours.use(None):
        wanted = getattr(functional, f"conv_transpose{ndim}d")(*inputs, **options)
        grad = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, inputs, grad)
    same([output], [wanted], dtype)
    same(torch.autograd.grad(output, inputs, grad), gradients, dtype)


SEPARABLE: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "1d": (1, (2, 6, 20), (6, 1, 5), 8, {"stride": 2, "padding": 2}),
    "2d same, unbatched": (2, (6, 9, 11), (6, 1, 3, 3), 8, {"padding": "same"}),
    "2d, two filters a channel": (2, (2, 4, 9, 8), (8, 1, 3, 3), 6, {"stride": 2, "padding": 1}),
    "3d": (3, (1, 4, 5, 6, 7), (4, 1, 3, 3, 3), 5, {"padding": 1, "dilation": (1, 2, 1)}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_convolutions_are_two_of_pytorchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ndim, of_input, of_depthwise, out, options = SEPARABLE[name]
    of_pointwise = (out, of_depthwise[0], *(1,) * ndim)
    inputs = [normal(each, dtype) for each in (of_input, of_depthwise, of_pointwise, (out,))]
    output = getattr(ours, f"separable_conv{ndim}d")(*inputs, **options)
    with ours.use(None):
        conv = getattr(functional, f"conv{ndim}d")
        x, depthwise, pointwise, bias = inputs
        channels = of_input[len(of_input) - ndim - 1]
        wanted = conv(conv(x, depthwise, None, **options, groups=channels), pointwise, bias)
        grad = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, inputs, grad)
    same([output], [wanted], dtype)
    same(torch.autograd.grad(output, inputs, grad), gradients, dtype)


def test_separable_convolutions_keep_pytorchs_rules() -> None:
    torch.manual_seed(0)
    inputs = normal((1, 2, 5, 5)), normal((2, 1, 3, 3)), normal((3, 2, 1, 1)), normal((3,))
    assert torch.autograd.gradcheck(ours.separable_conv2d, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours.separable_conv2d, inputs, fast_mode=True)
    operator = torch.ops.convgrad.separable_convolution.default
    torch.library.opcheck(operator, (*inputs, [1, 1], [1, 1], [1, 1]))
    empty = torch.empty(0, 2, 5, 5, dtype=torch.float64)
    assert ours.separable_conv2d(empty, *inputs[1:]).shape == (0, 3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        output = ours.separable_conv2d(*(each.float() for each in inputs))
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_is_pytorchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ndim, of_input, options = POOLS[name]
    input = normal(of_input, dtype)
    output = getattr(ours, f"max_pool{ndim}d")(input, **options)
    with ours.use(None):
        wanted = getattr(functional, f"max_pool{ndim}d")(input, **options)
        grad = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, [input], grad)
    assert torch.equal(output, wanted)
    same(torch.autograd.grad(output, [input], grad), gradients, dtype)


def test_channels_last_stays() -> None:
    torch.manual_seed(0)
    input = normal((2, 8, 7, 7), torch.float32, grad=False).to(memory_format=torch.channels_last)
    input.requires_grad_()
    weight = normal((16, 8, 3, 3), torch.float32)
    output = ours.conv2d(input, weight, padding=1)
    assert output.is_contiguous(memory_format=torch.channels_last)
    gradients = torch.autograd.grad(output, (input, weight), torch.randn_like(output))
    assert gradients[0].is_contiguous(memory_format=torch.channels_last)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    inputs = normal((2, 4, 5, 5)), normal((6, 2, 3, 3)), normal((6,))
    options = {"stride": 2, "padding": 1, "groups": 2}

    def conv(*tensors: Tensor) -> Tensor:
        return ours.conv2d(*tensors, **options)

    def transposed(*tensors: Tensor) -> Tensor:
        return ours.conv_transpose2d(*tensors, **options, output_padding=1)

    assert torch.autograd.gradcheck(conv, inputs)
    assert torch.autograd.gradgradcheck(conv, inputs)
    inputs = normal((1, 4, 3, 2)), normal((4, 1, 3, 3)), normal((2,))
    assert torch.autograd.gradcheck(transposed, inputs)
    assert torch.autograd.gradgradcheck(transposed, inputs)
    # Values far apart: finite differences must not change the maximum.
    spread = torch.randperm(2 * 3 * 36).double().view(2, 3, 6, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ours.max_pool2d(x, 3, 2, 1), (spread,))
    assert torch.autograd.gradgradcheck(
        lambda x: ours.max_pool2d(x, 3, 2, 1), (spread,), check_batched_grad=True
    )


def test_the_operators_keep_pytorchs_rules() -> None:
    torch.manual_seed(0)
    geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    input, weight, bias = normal((2, 4, 5, 5)), normal((6, 4, 3, 3)), normal((6,))
    convolution = torch.ops.convgrad.convolution.default
    torch.library.opcheck(convolution, (input, weight, bias, *geometry))
    torch.library.opcheck(convolution, (input, weight, None, *geometry))
    backward = torch.ops.convgrad.convolution_backward.default
    for mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(backward, (normal((2, 6, 5, 5)), input, weight, *geometry, mask))
    twice = torch.ops.convgrad.convolution_double_backward.default
    grad_output, *second = (normal(shape) for shape in ((2, 6, 5, 5), input.shape, weight.shape))
    tensors = (each.detach() for each in (*second, bias, grad_output, input, weight))
    torch.library.opcheck(twice, (*tensors, *geometry, [True, True, True]))
    pool = [2, 2], [2, 2], [0, 0], [1, 1], False
    torch.library.opcheck(torch.ops.convgrad.max_pool.default, (input, *pool))


def test_compiled_and_checkpointed() -> None:
    torch.manual_seed(0)
    input, weight = normal((2, 4, 5, 5), torch.float32), normal((6, 4, 3, 3), torch.float32)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return ours.max_pool2d(ours.conv2d(x, w, padding=1).relu(), 2)

    wanted = torch.autograd.grad(layer(input, weight).sum(), (input, weight))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    same(torch.autograd.grad(compiled(input, weight).sum(), (input, weight)), wanted, torch.float32)
    again = checkpoint(layer, input, weight, use_reentrant=False)
    same(torch.autograd.grad(again.sum(), (input, weight)), wanted, torch.float32)


def test_autocast_computes_in_its_dtype() -> None:
    input, weight = normal((1, 4, 5, 5), torch.float32), normal((6, 4, 3, 3), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = ours.conv2d(input, weight)
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert input.grad is not None
    assert input.grad.dtype is torch.float32


@pytest.mark.parametrize("ndim", [1, 3])
def test_single_gradients_in_1d_and_3d_are_pytorchs(ndim: int) -> None:
    torch.manual_seed(0)
    of_input, of_weight = (2, 4, *(7, 6, 5)[:ndim]), (6, 4, *(3, 2, 3)[:ndim])
    input, weight = normal(of_input, grad=False), normal(of_weight, grad=False)
    grad = torch.randn_like(getattr(functional, f"conv{ndim}d")(input, weight, stride=2))
    for name, given in (
        (f"conv{ndim}d_input", (of_input, weight, grad)),
        (f"conv{ndim}d_weight", (input, of_weight, grad)),
    ):
        found, wanted = getattr(ours, name)(*given, 2), getattr(torch.nn.grad, name)(*given, 2)
        same([found], [wanted], input.dtype)


def test_single_gradients_are_pytorchs() -> None:
    torch.manual_seed(0)
    input, weight = normal((2, 4, 7, 7), grad=False), normal((6, 4, 3, 3), grad=False)
    grad = normal((2, 6, 4, 4), grad=False)
    options = {"stride": 2, "padding": 1}
    found = ours.conv2d_input(input.shape, weight, grad, **options)
    same([found], [torch.nn.grad.conv2d_input(input.shape, weight, grad, **options)], input.dtype)
    found = ours.conv2d_weight(input, weight.shape, grad, **options)
    same([found], [torch.nn.grad.conv2d_weight(input, weight.shape, grad, **options)], input.dtype)
    steps = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    for mask in ([True, False, True], [False, False, True], [True, True, True]):
        some = ours.convolution_backward(grad, input, weight, None, *steps, mask)
        with ours.use(None):
            wanted = torch.ops.aten.convolution_backward(grad, input, weight, [6], *steps, mask)
        assert [each is not None for each in some] == mask
        kept = [each for each, asked in zip(wanted, mask, strict=True) if asked]
        same([each for each in some if each is not None], kept, input.dtype)


def test_an_empty_batch_is_no_error() -> None:
    input, weight = normal((0, 4, 5, 5)), normal((6, 4, 3, 3))
    output = ours.conv2d(input, weight)
    assert output.shape == (0, 6, 3, 3)
    output.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_second_derivatives_of_pooling_an_empty_batch_are_empty(ndim: int) -> None:
    input = normal((0, 2, *(6,) * ndim))
    output = getattr(ours, f"max_pool{ndim}d")(input, 2)
    (gradient,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), input)
    assert second.shape == input.shape


def test_refusals_say_what_was_expected(backend: ours.Backend) -> None:
    with ours.use(backend, fallback=False):
        with pytest.raises(ValueError, match="expected 4 dimensions, or 3 without a batch"):
            ours.conv2d(normal((5, 5)), normal((6, 4, 3, 3)))
        with pytest.raises(ValueError, match="expected stride 1"):
            ours.conv2d(normal((1, 4, 5, 5)), normal((6, 4, 3, 3)), stride=2, padding="same")
        with pytest.raises(InvalidProblem, match=r"expected .* from input's 5 channels"):
            ours.conv2d(normal((1, 5, 5, 5)), normal((6, 4, 3, 3)))
