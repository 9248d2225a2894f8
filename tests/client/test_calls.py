"""Calls: what the operations' functions take, check and build, with no connection in sight."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import AsyncClient, Client, MalformedRequest, calls
from convgrad.contract import OPERATIONS
from tests.support.fake_server import ones

# The form of tensors in JSON is the SDK's own business; `Stored` and with_options say the others.
ASKED_FOR_NOTHING = {"response", "stored", "store"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_function_takes_the_fields_of_its_contract(name: str) -> None:
    signature = inspect.signature(getattr(calls, name))
    fields = OPERATIONS[name].request.model_fields
    assert set(signature.parameters) == set(fields) - ASKED_FOR_NOTHING
    for field_name, parameter in signature.parameters.items():
        field = fields[field_name]
        if parameter.default is inspect.Parameter.empty:
            assert field.is_required(), field_name
        elif parameter.default is not None:
            assert parameter.default == field.default, field_name


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("name", OPERATIONS)
def test_both_clients_have_every_operation(client: type, name: str) -> None:
    method, build = getattr(client, name), getattr(calls, name)
    said = inspect.getdoc(method) or ""
    assert said.replace("= await client.", "= client.") == inspect.getdoc(build)
    assert (f"= await client.{name}(" in said) == (client is AsyncClient)
    assert method.__name__ == name
    ours, theirs = inspect.signature(method), inspect.signature(build)
    assert list(ours.parameters.values())[1:] == list(theirs.parameters.values())
    assert theirs.return_annotation == f"Call[{ours.return_annotation}]"
    assert inspect.iscoroutinefunction(method) == (client is AsyncClient)


@pytest.mark.parametrize("name", OPERATIONS)
def test_docstrings_have_numpys_sections_and_every_parameter(name: str) -> None:
    build = getattr(calls, name)
    text = inspect.getdoc(build) or ""
    places = [text.index(f"\n{title}\n{'-' * len(title)}\n") for title in SECTIONS]
    assert places == sorted(places)
    assert "Source: " in text
    parameters = text[places[0] : places[1]]
    named = [line.partition(" : ")[0] for line in parameters.splitlines() if " : " in line]
    assert ", ".join(named).split(", ") == list(inspect.signature(build).parameters)
    assert f"client.{name}(" in text[places[-1] :]


SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples")


@pytest.mark.parametrize("name", OPERATIONS)
def test_layouts_are_literals(name: str) -> None:
    layout = typing.get_type_hints(getattr(calls, name)).get("layout")
    if layout is not None:
        assert set(_literals(layout)) == set(OPERATIONS[name].layouts)


def _literals(annotation: Any) -> Iterator[str]:
    for member in typing.get_args(annotation):
        if isinstance(member, str):
            yield member
        else:
            yield from _literals(member)


def test_the_weight_gradient_takes_its_tensors_by_name_alone() -> None:
    x, grad_output = ones(1, 1, 4), ones(1, 1, 4)
    for given in ((x, grad_output), (x,)):
        with pytest.raises(TypeError, match="only as keyword arguments, input=… and grad_output=…"):
            calls.grouped_conv_bwd_weight(*given)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="only as keyword arguments"):
        Client("http://server").grouped_conv_bwd_weight(x, grad_output)  # type: ignore[call-overload]


class TorchLike:
    """The part of a PyTorch tensor's interface that is used for bfloat16."""

    def __init__(self, bits: Any, dtype: str, *, requires_grad: bool = False) -> None:
        self.bits, self.dtype, self.requires_grad = bits, dtype, requires_grad

    def contiguous(self) -> TorchLike:
        return self

    def view(self, dtype: Any) -> TorchLike:
        return TorchLike(self.bits, dtype)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.bits


def test_a_tensor_of_pytorch_in_bfloat16_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(int16="torch.int16"))
    array = np.arange(4).astype(ml_dtypes.bfloat16).reshape(1, 1, 4)
    tensor = TorchLike(array.view(np.int16), "torch.bfloat16")
    sent = calls.conv_fwd(tensor, ones(1, 1, 1, dtype=ml_dtypes.bfloat16)).tensors["input"]
    assert sent.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(sent, array)
    assert np.shares_memory(sent, array)
    tensor.requires_grad = True  # as PyTorch refuses it in other dtypes
    with pytest.raises(MalformedRequest, match=r"requires grad; pass tensor\.detach"):
        calls.conv_fwd(tensor, ones(1, 1, 1, dtype=ml_dtypes.bfloat16))


def test_reprs_say_dtypes_and_shapes_and_no_elements() -> None:
    large = np.zeros((64, 64, 56, 56), np.float32)
    call = calls.conv_fwd(large, ones(8, 64, 3, 3), padding=1)
    assert repr(call) == (
        "Call.conv_fwd(input=float32[64, 64, 56, 56], weight=float32[8, 64, 3, 3], padding=1)"
    )
    result = convgrad.ConvWeightResult(ones(8, 4), None)
    assert repr(result) == "ConvWeightResult(grad_weight=float32[8, 4], grad_bias=None)"
    assert "<td>float32[8, 4]</td>" in result._repr_html_()
    stored = convgrad.Stored("w", (8, 4), convgrad.DType.BFLOAT16)
    assert repr(stored) == "Stored('w', bfloat16[8, 4])"
    part = convgrad.Part("output", 0, 0, 1, large[:1], large)
    assert len(repr(part)) < 150
    report = convgrad.Report(backend="cpu", kernel="direct", flops=1, bytes=1, compute_s=0.5)
    answer = convgrad.Answer({"output": large}, report, "id", {}, 1)
    assert repr(answer) == (
        "Answer(outputs={output: float32[64, 64, 56, 56]}, kernel='direct on cpu', compute_s=0.5, "
        "attempts=1, request_id='id')"
    )
    assert answer._repr_html_().startswith("<table><caption>Answer</caption><tr><th>outputs</th>")
    assert repr(Client("http://server:1", api_key="secret")) == "Client('http://server:1')"


def test_a_call_holds_what_was_given_and_no_defaults() -> None:
    call = calls.conv_bwd_data(
        ones(1, 2, 3), ones(2, 2, 3), stride=(2,), padding=[(0, 1)], groups=1
    )
    assert call.operation == "conv_bwd_data"
    assert set(call.tensors) == {"grad_output", "weight"}
    assert call.parameters == {"stride": [2], "padding": [[0, 1]]}


def test_numpy_ints_are_ints() -> None:
    call = calls.conv_fwd(ones(1, 1, 4), ones(1, 1, 2), stride=np.int64(2))  # type: ignore[arg-type]
    assert call.parameters == {"stride": 2}


def test_lists_become_float64() -> None:
    call = calls.conv_fwd([[[1.0, 2.0]]], [[[1.0]]])
    assert call.tensors["input"].dtype == np.float64


def test_a_contiguous_array_is_not_copied() -> None:
    array = ones(1, 1, 4)
    assert calls.conv_fwd(array, array).tensors["input"] is array


def test_strides_and_byte_order_are_made_plain() -> None:
    array = np.arange(24, dtype=">f4").reshape(1, 4, 6)
    sent = calls.conv_fwd(array[:, :, ::2], ones(1, 4, 1)).tensors["input"]
    assert sent.flags.c_contiguous
    assert sent.dtype.isnative
    np.testing.assert_array_equal(sent, array[:, :, ::2])


def test_bfloat16_is_taken() -> None:
    array = ones(1, 1, 4, dtype=ml_dtypes.bfloat16)
    assert calls.conv_fwd(array, array).tensors["input"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.ones(3, np.complex64), "input: expected a dtype of float16, .*; got complex64"),
        (np.ones(3, bool), "input: .* got bool"),
        ([[1.0], [1.0, 2.0]], "input: expected a numeric array, got builtins.list"),
        ("words", "input: expected a dtype of"),
        (object(), "input: expected a dtype of"),
    ],
)
def test_what_is_no_tensor_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        calls.conv_fwd(value, ones(1, 1, 1))


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"stride": 1.5}, "stride: expected .*, got 1.5"),
        ({"stride": "2"}, "stride: expected"),
        ({"precision": "low"}, 'precision: expected "highest" or "high"'),
        ({"deterministic": 1}, "deterministic: expected true or false"),
    ],
)
def test_wrong_parameters_are_refused_by_the_contract(
    parameters: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        calls.conv_fwd(ones(1, 1, 4), ones(1, 1, 2), **parameters)


def test_results_are_read_by_name() -> None:
    arrays = {"grad_bias": ones(1), "grad_weight": ones(2)}
    some = calls.conv_backward(
        ones(1, 1, 1), ones(1, 1, 1), ones(1, 1, 1), outputs=("grad_weight", "grad_bias")
    ).read(arrays)
    assert some == convgrad.ConvBackwardResult(None, arrays["grad_weight"], arrays["grad_bias"])
    weight_alone = calls.grouped_conv_bwd_weight(
        input=ones(1, 1, 1), grad_output=ones(1, 1, 1)
    ).read(arrays)
    assert weight_alone == convgrad.ConvWeightResult(arrays["grad_weight"], None)


def test_an_output_that_did_not_come_is_an_invalid_answer() -> None:
    call = calls.maxpool2d_fwd(ones(1, 1, 2, 2), 2, return_indices=True)
    with pytest.raises(convgrad.InvalidAnswer, match="lacks indices; it has output"):
        call.read({"output": ones(1)})
