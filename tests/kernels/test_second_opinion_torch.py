"""PyTorch on the CPU as a second opinion, in float64: the reference's and every backend's.

PyTorch pads symmetrically, so these are the geometries without a pair of different pads. It is no
dependency: `make test-torch` installs it aside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers
from tests.support.numerics.arrays import DTYPES, Arrays, draw, integers, normals, rng_for
from tests.support.numerics.bounds import U
from tests.support.numerics.cases import (
    FUSED,
    Case,
    conv3d_transpose,
    conv_backward,
    conv_fwd,
    grouped_conv_bwd_weight,
    maxpool_bwd,
    maxpool_fwd,
)
from tests.support.numerics.cases import conv_bwd_data as conv_bwd_data_case
from tests.support.numerics.geometries import CONVS, POOLS, Conv, Pool
from tests.support.numerics.oracle import expected
from tests.support.numerics.reference import Reference, padding_pairs, per_dimension

torch = pytest.importorskip("torch")
F64 = DTYPES["float64"]
functional = torch.nn.functional
CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
POOL = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}


def symmetric(padding: Any, ndim: int) -> tuple[int, ...] | None:
    """The padding as PyTorch takes it, or None where before and after differ."""
    pairs = padding_pairs(padding, ndim)
    return tuple(a for a, _ in pairs) if all(a == b for a, b in pairs) else None


SYMMETRIC = {n: c for n, c in CONVS.items() if symmetric(c.padding, c.ndim) is not None}
# PyTorch limits the padding to half the kernel, undilated.
POOLABLE = {
    name: pool
    for name, pool in POOLS.items()
    if (pad := symmetric(pool.padding, pool.ndim)) is not None
    and all(2 * p <= k for p, k in zip(pad, per_dimension(pool.kernel, pool.ndim), strict=True))
}


def geometry(conv: Conv) -> dict[str, Any]:
    return {
        "stride": per_dimension(conv.stride, conv.ndim),
        "padding": symmetric(conv.padding, conv.ndim),
        "dilation": per_dimension(conv.dilation, conv.ndim),
        "groups": conv.groups,
    }


def tensor(array: NDArray[Any]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array))


def agree(backend: Backend, case: Case, tensors: Arrays, theirs: dict[str, Any]) -> None:
    """Three answers, each as exact as float64 allows of the others."""
    ours, reference = (
        answers(backend, case, tensors),
        expected(case.operation, tensors, case.params),
    )
    for name, their in theirs.items():
        found, of = their.detach().numpy(), reference[name]
        if not isinstance(of, Reference):
            assert (found == of).all(), f"{case.id}: PyTorch's {name} is not the reference's"
            assert (found == ours[name]).all(), f"{case.id}: PyTorch's {name} is not ours"
            continue
        assert found.shape == of.value.shape
        allowed = 4 * (of.terms + 4) * U["float64"] * (of.magnitude + 1e-300) + of.slack
        for whose, value in (("the reference's", of.value), ("ours", ours[name])):
            share = float((np.abs(found - value) / allowed).max())
            assert share <= 1, f"{case.id}: PyTorch's {name} is not {whose}, {share} of allowed"


@pytest.mark.parametrize("name", SYMMETRIC)
def test_convolution(backend: Backend, seed: int, name: str) -> None:
    conv = SYMMETRIC[name]
    case = conv_fwd(name, conv)
    tensors = draw(case, rng_for(seed, name), F64, normals)
    x, w, b = (tensor(tensors[key]) for key in ("input", "weight", "bias"))
    agree(backend, case, tensors, {"output": CONV[conv.ndim](x, w, b, **geometry(conv))})


@pytest.mark.parametrize("name", SYMMETRIC)
def test_convolution_backward(backend: Backend, seed: int, name: str) -> None:
    """aten::convolution_backward, against conv_backward and the two gradients by themselves."""
    conv = SYMMETRIC[name]
    case = conv_backward(name, conv)
    tensors = draw(case, rng_for(seed, name), F64, normals)
    shape = geometry(conv)
    dx, dw, db = torch.ops.aten.convolution_backward(
        *(tensor(tensors[key]) for key in ("grad_output", "input", "weight")),
        [conv.k],
        shape["stride"],
        shape["padding"],
        shape["dilation"],
        False,
        [0] * conv.ndim,
        conv.groups,
        [True, True, True],
    )
    agree(backend, case, tensors, {"grad_input": dx, "grad_weight": dw, "grad_bias": db})
    data = conv_bwd_data_case(name, conv)
    agree(backend, data, {key: tensors[key] for key in data.shapes}, {"grad_input": dx})
    weight = grouped_conv_bwd_weight(name, conv)
    given = {key: tensors[key] for key in weight.shapes}
    agree(backend, weight, given, {"grad_weight": dw, "grad_bias": db})


@pytest.mark.parametrize("name", [name for name, conv in SYMMETRIC.items() if conv.ndim == 3])
def test_transposed(backend: Backend, seed: int, name: str) -> None:
    conv = SYMMETRIC[name]
    shape = geometry(conv)
    steps = zip(shape["stride"], shape["dilation"], conv.rows_left_over, strict=True)
    if any(extra >= max(s, d) for s, d, extra in steps):
        pytest.skip("PyTorch refuses this output_padding")
    case = conv3d_transpose(name, conv)
    tensors = draw(case, rng_for(seed, name), F64, normals)
    x, w, b = (tensor(tensors[key]) for key in ("input", "weight", "bias"))
    theirs = functional.conv_transpose3d(x, w, b, output_padding=conv.rows_left_over, **shape)
    agree(backend, case, tensors, {"output": theirs})


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
}


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.id)
def test_fused(backend: Backend, seed: int, case: Case) -> None:
    tensors = draw(case, rng_for(seed, case.id), F64, normals)
    x = tensor(tensors["input"])
    for i in (0, 1):
        given = dict(case.params[f"conv{i}"])
        given["padding"] = symmetric(given.get("padding", 0), case.ndim)
        if given["padding"] is None:
            pytest.skip("PyTorch pads symmetrically")
        bias = tensors.get(f"bias{i}")
        x = CONV[case.ndim](
            x, tensor(tensors[f"weight{i}"]), None if bias is None else tensor(bias), **given
        )
        x = ACTIVATIONS[case.params.get(f"activation{i}", "none")](x)
    agree(backend, case, tensors, {"output": x})


def strewn_with_nans(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    array = integers(rng, shape, dtype)
    array[rng.random(shape) < 0.05] = np.nan
    array[rng.random(shape) < 0.1] = -np.inf
    return array


@pytest.mark.parametrize("numbers", [normals, integers, strewn_with_nans])
@pytest.mark.parametrize("name", POOLABLE)
def test_pooling(backend: Backend, seed: int, name: str, numbers: Any) -> None:
    """Values, indices and gradients; ties and NaNs as PyTorch has them."""
    pool: Pool = POOLABLE[name]
    case = maxpool_fwd(name, pool)
    tensors = draw(case, rng_for(seed, name), F64, numbers)
    x = tensor(tensors["input"]).requires_grad_()
    params = {**pool.params, "padding": symmetric(pool.padding, pool.ndim)}
    output, indices = POOL[pool.ndim](x, **params, return_indices=True)
    found = answers(backend, case, tensors)
    wanted = expected(case.operation, tensors, case.params)
    for answer in (found["output"], wanted["output"].value):  # type: ignore[union-attr]
        np.testing.assert_array_equal(output.detach().numpy(), answer)
    for answer in (found["indices"], wanted["indices"]):
        np.testing.assert_array_equal(indices.numpy(), answer)
    backward = maxpool_bwd(name, pool)
    dy = normals(rng_for(seed, name, "dy"), pool.output_shape, F64)
    output.backward(tensor(dy))
    given = {"grad_output": dy, "input": tensors["input"]}
    agree(backend, backward, given, {"grad_input": x.grad})
