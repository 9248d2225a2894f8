"""Layers in anybody's words: each dialect read, written and read again."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad import layers
from convgrad.contract import OPERATIONS, validate
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.layers import Layer
from convgrad_service.problems import problem_from

SUITE = Path(__file__).parents[2] / "perf" / "suite"

RESNET = Layer(
    batch=32,
    in_channels=64,
    out_channels=64,
    input_size=(56, 56),
    kernel_size=(3, 3),
    stride=(1, 1),
    padding=((1, 1), (1, 1)),
    dilation=(1, 1),
)


@pytest.mark.parametrize(
    "words",
    [
        "mb32ic64ih56oc64oh56kh3ph1",
        'g1mb32_ic64oc64_ih56oh56kh3sh1dh0ph1n"resnet"',
        "./benchdnn --conv --mode=P --dt=f32 mb32ic64ih56oc64kh3ph1",
        "mb32ic64ih56oc64oh56kh3",  # benchdnn finds the padding
        "conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -u 1 -v 1 -l 1 -j 1 -t 1 -V 0",
        "./bin/MIOpenDriver conv --batchsize 32 --in_channels 64 --in_h 56 --in_w 56 "
        "--out_channels 64 --fil_h 3 --fil_w 3 --pad_h 1 --pad_w 1",
        "Conv2d(64, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False) "
        "on 32x64x56x56",
        "nn.Conv2d(64, 64, 3, padding=same, bias=False) input (32, 64, 56, 56)",
        "Y = Conv <pads = [1, 1, 1, 1]> (float[32,64,56,56] X, float[64,64,3,3] W)",
        "%Y = Conv[dilations = [1, 1], group = 1, kernel_shape = [3, 3], pads = [1, 1, 1, 1], "
        "strides = [1, 1]](%X, %W) X: 32x64x56x56, W: 64x64x3x3",
        'Y = Conv <auto_pad: string = "SAME_UPPER", group: int = 1> '
        "(float[32,64,56,56] X, float[64,64,3,3] W)",
    ],
)
def test_the_same_layer_in_each_dialect(words: str) -> None:
    found = layers.parse(words)
    assert replace(found, dtype=None, name=None) == RESNET


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "is not known"),
        ("resnet_conv", "did you mean 'resnet_conv1'"),
        ("mb32ic64ih56", "is not known|neither kh"),
        ("mb32ic64ih56oc64oh99kh3ph1sh2", "oh is 99; from ih 56"),
        ("mb1mb2ic3ih4oc5kh1", "has mb twice"),
        ("--conv --attr-post-ops=sum mb32ic64ih56oc64kh3", "--attr-post-ops=sum"),
        ("--conv --dt=s8 mb32ic64ih56oc64kh3", "data type 's8'"),
        ("conv -n 32 -Q 7", "option '-Q' is not supported"),
        ("conv -n x", "expected a number"),
        ("conv -n \u00b2", "expected a number"),
        ("--conv --mb=\u00b2 ic3ih8oc4oh6kh3ph0", "--mb is '\u00b2'; expected a number"),
        (f"--conv --mb={'9' * 100} ic3ih8oc4oh6kh3ph0", "--mb is '9+'; expected a number"),
        ("conv -n", "has no value"),
        ("convint8 -n 4", "is not known"),
        ("pool -m min", "mode 'min'"),
        ("Conv2d(3, 64, kernel_size=(3, 3))", r"input.s shape; add it: Conv2d\(…\) on 32x3x56x56"),
        ("Conv2d(64, 64, kernel_size=3) on 32x32x56x56", "takes 64 channels"),
        ("Conv2d(64, 64, kernel_size=3, padding_mode=reflect) on 1x64x5x5", "'reflect'"),
        ("Conv2d(64, 64, kernel_size=__import__('os')) on 1x64x5x5", "cannot be read"),
        ("Conv2d(64, 64, kernel_size=9) on 1x64x5x5", "does not fit"),
        ("Conv2d(64, 66, 3, groups=4) on 1x64x5x5", "multiple of the groups"),
        ('Conv2d(64, "64", 3) on 1x64x5x5', "out_channels cannot be '64'"),
        ("Conv2d(64, 64, 3x3) on 1x64x5x5", "cannot be read"),
        ("Conv2d(64, 64, None) on 1x64x5x5", "kernel_size cannot be None"),
        ("Conv2d(64, 64, 3, stride=0) on 1x64x5x5", "stride is 0; expected 1 to"),
        ("mb999999999999ic4ih5oc5kh1", "batch is 999999999999; expected 1 to 2147483647"),
        ("--conv --stag=axb --dtag=abx mb1ic4ih5oc5kh1", "one layout for all tensors"),
        ("--pool --alg=min mb1ic4ih5kh1", "benchdnn pooling 'min'"),
        (
            "Y = MaxPool <kernel_shape = [3]> (float[5] X)",
            "input has 1 dimensions; expected 3 to 5",
        ),
        ("Y = MaxPool <kernel_shape = 3> (float[1,2,5,5] X)", "kernel_shape cannot be 3"),
        (
            "Y = ConvTranspose <output_shape = [99, 9]> (float[1,2,5,5] X, float[2,2,3,3] W)",
            "output_shape .* is too large",
        ),
        ("Y = Conv <group = 1> (X, W)", "comes with 0 shapes"),
        ("Y = Conv <hidden = 1> (float[1,2,5,5] X, float[2,2,3,3] W)", "attribute 'hidden'"),
        ("Y = Conv <group = 2> (float[1,2,5,5] X, float[2,2,3,3] W)", "weight takes 4 channels"),
        ("Y = Conv <pads = [1, 1]> (float[1,2,5,5] X, float[2,2,3,3] W)", "pads have 2 values"),
        ("x" * 5000, "expected at most 4,096"),
    ],
)
def test_what_cannot_be_read_is_said(words: str, sentence: str) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        layers.parse(words)


def test_what_the_words_say_beside_the_sizes() -> None:
    one = layers.parse("--conv --dt=bf16 --dir=BWD_W --stag=axb mb2ic4ih5oc4kh3ph1")
    assert (one.dtype, one.operation, one.layout) == (
        DType.BFLOAT16, "grouped_conv_bwd_weight", "NHWC",
    )  # fmt: skip
    other = layers.parse("convfp16 -n 2 -c 4 -k 4 -H 5 -W 5 -p 1 -q 1 -F 2 -I NHWC -b 1")
    assert (other.dtype, other.operation, other.layout, other.bias) == (
        DType.FLOAT16, "conv_bwd_data", "NHWC", True,
    )  # fmt: skip
    third = layers.parse("Y = Conv (bfloat16[1,2,5,5] X, bfloat16[2,2,3,3] W, bfloat16[2] B)")
    assert (third.dtype, third.bias) == (DType.BFLOAT16, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("(conv1): Conv2d(3, 8, 3, bias=False) on 1x3x8x8", "mb1ic3ih8oc8oh6kh3ph0"),
        ("--conv --stag=any --wtag=any --dtag=axb mb1ic3ih8oc8kh3", "mb1ic3ih8oc8oh6kh3ph0"),
        ("--pool --alg=pooling_avg_include_padding mb1ic3ih8kh2sh2",
         "--pool --alg=avg_p mb1ic3ih8oh4kh2sh2ph0"),
        ("AdaptiveAvgPool2d((None, 3)) on 1x5x7x7",
         "AdaptiveAvgPool2d(output_size=(7, 3)) on 1x5x7x7"),
        ("Y = GlobalMaxPool (float[1,5,7,7] X)",
         "AdaptiveMaxPool2d(output_size=(1, 1)) on 1x5x7x7"),
        # Its windows beyond the padding count less in the divisor than padding would.
        ("AvgPool2d(3, stride=2, ceil_mode=True) on 1x5x8x8",
         "AvgPool2d(kernel_size=(3, 3), stride=(2, 2), padding=(0, 0), ceil_mode=True) on 1x5x8x8"),
        ("Y = ConvTranspose <strides = [2, 2], output_shape = [10, 10]> "
         "(float[1,4,5,5] X, float[4,3,3,3] W)", "--deconv mb1ic4ih5oc3oh10kh3sh2ph1"),
        ('Y = ConvTranspose <strides = [3, 3], auto_pad = "SAME_UPPER"> '
         "(float[1,4,5,5] X, float[4,3,2,2] W)", "--deconv mb1ic4ih5oc3oh15kh2sh3ph0"),
    ],
)  # fmt: skip
def test_what_the_words_stand_for(words: str, text: str) -> None:
    assert layers.text(layers.parse(words)) == text


SAMPLES = (
    "--conv --dt=bf16 --stag=axb g2mb1ic4ih8oc8kh3ph1n\"x\"",
    "MIOpenDriver convfp16 -n 1 -c 4 -H 8 -W 8 -k 8 -y 3 -x 3 -m trans -F 2",
    "ConvTranspose2d(4, 8, kernel_size=(3, 3), stride=2, output_padding=1, bias=False) on 1x4x8x8",
    "AdaptiveMaxPool1d(output_size=(2,)) on 1x4x8",
    'Y = Conv <group = 2, auto_pad = "VALID", pads = [1]> (float[1,4,8,8] X, float[8,2,3,3] W)',
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_words_are_read_or_refused(sample: str, data: st.DataObject) -> None:
    words = list(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(words) - 1))
        other = data.draw(
            st.sampled_from(["", "0", "-", "9" * 13, "None", "'a'", "(", "]", " ", "="])
        )
        words[at : at + data.draw(st.integers(0, 3))] = other
        words = words or [" "]
    with suppress(MalformedRequest):
        layers.spellings(layers.parse("".join(words)))


@st.composite
def any_layer(draw: st.DrawFn) -> Layer:
    ndim = draw(st.integers(1, 3))
    kind = draw(
        st.sampled_from(["conv", "deconv", "pool", "avg_pool", "adaptive_pool", "separable"])
    )

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    if kind == "adaptive_pool":
        channels = draw(st.integers(1, 4))
        return Layer(
            kind="adaptive_pool",
            batch=draw(st.integers(1, 4)),
            in_channels=channels,
            out_channels=channels,
            input_size=each(1, 9),
            adaptive_size=each(1, 9),
            kernel_size=(),
            stride=(),
            padding=(),
            dilation=(),
            operation=draw(st.sampled_from(["adaptive_avg_pool_fwd", "adaptive_max_pool_fwd"])),
        )
    pools = kind in ("pool", "avg_pool")
    groups = draw(st.sampled_from([1, 2, 4])) if kind in ("conv", "deconv") else 1
    kernel, stride = each(1, 5), each(1, 3)
    dilation = (1,) * ndim if kind == "avg_pool" else each(1, 3)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    most = [min((r - 1), k // 2 if pools else r - 1) for r, k in zip(reach, kernel, strict=True)]
    padding = tuple((draw(st.integers(0, m)), draw(st.integers(0, m))) for m in most)
    if draw(st.booleans()):
        padding = tuple((before, before) for before, _ in padding)
    size = tuple(r + more for r, more in zip(reach, each(0, 9), strict=True))
    channels = groups * draw(st.integers(1, 4))
    more = tuple(draw(st.integers(0, s - 1)) for s in stride) if kind == "deconv" else ()
    if kind == "deconv":
        # Output padding stands for less than no padding after, which is one or the other.
        padding = tuple((a, 0 if m else b) for (a, b), m in zip(padding, more, strict=True))
        size = tuple(s + 3 * r for s, r in zip(size, reach, strict=True))
    return Layer(
        kind=kind,  # type: ignore[arg-type]
        batch=draw(st.integers(1, 4)),
        in_channels=channels,
        out_channels=channels if pools else groups * draw(st.integers(1, 4)),
        groups=groups,
        input_size=size,
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=more,
        ceil_mode=pools and draw(st.booleans()),
        count_include_pad=kind != "avg_pool" or draw(st.booleans()),
        bias=kind in ("conv", "deconv") and draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(any_layer())
def test_every_spelling_is_read_back(layer: Layer) -> None:
    for dialect, words in layers.spellings(layer).items():
        found = layers.parse(words)
        wanted = layer
        if dialect == "benchdnn":
            wanted = replace(layer.normalised(), bias=False)
            if layer.kind == "deconv":
                found, wanted = _transposed(found), _transposed(wanted)
        assert replace(found, dtype=None) == wanted, (dialect, words)


def _transposed(layer: Layer) -> Layer:
    """A deconvolution by its sizes: padding after and output padding make up for each other."""
    net = tuple(
        (a, b - more) for (a, b), more in zip(layer.padding, layer.output_padding, strict=True)
    )
    assert all(a >= 0 for a, _ in net)
    return replace(
        layer,
        padding=tuple((a, max(0, b)) for a, b in net),
        output_padding=tuple(max(0, -b) for _, b in net),
    )


@settings(max_examples=150, deadline=None)
@given(any_layer(), st.sampled_from([None, "first", "last", "grouped"]))
def test_the_service_takes_what_a_layer_says(layer: Layer, order: str | None) -> None:
    """Shapes and parameters agree with one another, and with the sizes of the answer."""
    hw = "DHW"[3 - layer.ndim :]
    layout = {None: None, "first": f"NC{hw}", "last": f"N{hw}C", "grouped": f"N{hw}GC"}[order]
    if order == "grouped" and (layer.pools or layer.kind == "separable"):
        layout = None
    for operation in layers.operations_of(layer):
        if operation == "conv3d_backprop_input" and order == "grouped":
            continue
        if "pool" in operation and layer.kernel_size and _has_empty_window(layer):
            continue
        if operation == "max_unpool_fwd" and any(a != b for a, b in layer.padding):
            with pytest.raises(MalformedRequest, match="same padding"):
                layers.arguments(operation, layer, layout)
            continue
        shapes, parameters = layers.arguments(operation, layer, layout)
        if operation == "conv3d_transpose" and not _fits(layer, parameters):
            continue
        blank: dict[str, Any] = {
            name: np.broadcast_to(np.int64(0) if name == "indices" else np.float32(0), shape)
            for name, shape in shapes.items()
        }
        request = validate(OPERATIONS[operation].request, {**blank, **parameters})
        problem = problem_from(operation, request)
        wide = layers.arguments("conv_fwd", layer, layout) if layer.kind == "conv" else None
        if wide is not None and "grad_input" in problem.outputs and layer.ndim < 3:
            assert problem.outputs["grad_input"].shape == wide.shapes["input"]


def _has_empty_window(layer: Layer) -> bool:
    return max(layer.dilation) > 1 or layer.ceil_mode


def _fits(layer: Layer, parameters: dict[str, Any]) -> bool:
    """The service takes less output padding than the larger of stride and dilation."""
    return all(
        more < max(s, d)
        for more, s, d in zip(
            parameters["output_padding"], layer.stride, layer.dilation, strict=True
        )
    )


def _of_suite(entry: dict[str, Any]) -> Layer:
    channels = entry["C"]
    return Layer(
        kind={"conv": "conv", "maxpool": "pool", "separable": "separable"}[entry["kind"]],  # type: ignore[arg-type]
        batch=entry.get("N", 1),
        in_channels=channels,
        out_channels=entry.get("K", channels),
        groups=entry.get("groups", 1) if entry["kind"] == "conv" else 1,
        input_size=tuple(entry["input_size"]),
        kernel_size=tuple(entry["kernel_size"]),
        stride=tuple(entry["stride"]),
        padding=tuple(
            (pad, pad) if isinstance(pad, int) else tuple(pad) for pad in entry["padding"]
        ),
        dilation=tuple(entry["dilation"]),
        name=entry["name"],
    )


@pytest.mark.parametrize("name", ["layers", "networks"])
def test_the_packaged_suite_is_that_of_the_benchmarks(name: str) -> None:
    entries = json.loads((SUITE / f"{name}.json").read_text(encoding="utf-8"))
    packaged = layers.suite(name)
    assert [each.layer.name for each in packaged] == [entry["name"] for entry in entries]
    for each, entry in zip(packaged, entries, strict=True):
        assert each.layer == _of_suite(entry).normalised(), entry["name"]
        assert each.layer.output_size == tuple(entry["output_size"])
        assert dict(each.networks) == entry.get("networks", {})


def test_a_network_is_a_suite() -> None:
    assert "resnet50" in layers.suite_names()
    assert sum(each.networks["resnet50"] for each in layers.suite("resnet50")) == 53
    with pytest.raises(MalformedRequest, match="there is no suite 'resnet51'"):
        layers.suite("resnet51")
