"""Forward-mode differentiation of backward passes under `use`: tangents are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jacrev
from torch.nn import functional

import convgrad.torch as ours

Tensor = torch.Tensor
Loss = Callable[[Tensor], Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


def convolved(weight: Tensor) -> Tensor:
    """Values in windows, in which the maxima of the tangents are elsewhere than their own."""
    shape = (1, 1, *(5,) * (weight.dim() - 2))
    x = torch.arange(5 ** (weight.dim() - 2), dtype=torch.double).mul(7).sin().view(shape)
    y: Tensor = getattr(functional, f"conv{weight.dim() - 2}d")(x, weight)
    return y


def max_pool1d(weight: Tensor) -> Tensor:
    return functional.max_pool1d(convolved(weight)[0], 2)


def max_pool2d(weight: Tensor) -> Tensor:
    return functional.max_pool2d(convolved(weight), 2)


def overlapping_max_pool2d(weight: Tensor) -> Tensor:
    return functional.max_pool2d(convolved(weight), 3, 1, 1, return_indices=True)[0]


def max_pool3d(weight: Tensor) -> Tensor:
    return functional.max_pool3d(convolved(weight), 2)


def average(weight: Tensor) -> Tensor:
    return functional.avg_pool2d(convolved(weight), 2)


def transposed(weight: Tensor) -> Tensor:
    return functional.conv_transpose2d(convolved(weight), weight)


def dual(loss: Loss, weight: Tensor, order: int) -> Tensor:
    """Return the tangent of a gradient of a gradient …, by dual numbers."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(weight.clone().requires_grad_(), weight.mul(5).cos())
        found = loss(x)
        for left in reversed(range(order)):
            (found,) = torch.autograd.grad(found.sin().sum(), x, create_graph=left > 0)
        tangent: Tensor = forward_ad.unpack_dual(found).tangent
        return tangent


@pytest.mark.parametrize(
    ("layers", "ndim"),
    [
        (convolved, 2),
        (transposed, 2),
        (max_pool1d, 2),
        (max_pool2d, 2),
        (overlapping_max_pool2d, 2),
        (max_pool3d, 3),
        (average, 2),
    ],
)
def test_tangents_of_gradients(layers: Loss, ndim: int) -> None:
    weight = torch.tensor([0.9, -0.4, 0.3, 0.7] * (ndim - 1), dtype=torch.double)
    weight = weight.view(1, 1, *(2,) * ndim)

    def loss(weight: Tensor) -> Tensor:
        return layers(weight).pow(3).sum()

    transforms: list[Any] = [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))]

    def all_of_them() -> list[Tensor]:
        found = [transform(loss)(weight) for transform in transforms]
        return [*found, dual(loss, weight, 1), dual(loss, weight, 2)]

    wanted = all_of_them()
    with ours.use(ours.Local()):
        found = all_of_them()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_max_pooling_from_indices_does_not_depend_on_the_input() -> None:
    """As in graphs of forward-mode differentiation, which may be compiled before `use`."""
    x = torch.randn(2, 3, 4, 6, 6)
    output, indices = functional.max_pool3d(x, 2, 1, return_indices=True)
    grad, window = torch.randn_like(output), ([2] * 3, [1] * 3, [0] * 3, [1] * 3, False)
    backward = torch.ops.aten.max_pool3d_with_indices_backward
    wanted = backward(grad, x, *window, indices)
    ours.report(reset=True)
    with ours.use(ours.Local(), fallback=False):
        found = backward(grad, torch.zeros_like(x), *window, indices)
    torch.testing.assert_close(found, wanted)
    assert {row.computed_by for row in ours.report(reset=True).rows} == {"local"}
