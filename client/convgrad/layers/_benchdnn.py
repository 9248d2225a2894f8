"""Parses and formats benchdnn problem strings, such as ``g1mb32ic64ih56oc64oh56kh3ph1``.

Omitted sizes are inferred as in benchdnn: widths from heights, the output from the input and vice
versa, and the padding from both. benchdnn counts dilation from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.layers._layer import Kind, Layer, padding_after

__all__ = ["looks_like_benchdnn", "parse_benchdnn", "to_benchdnn"]

_FIELD = re.compile(r"(g|mb|ic|oc|[io][dhw]|[ksdp][dhw])(\d{1,12})_?")
# The second names are oneDNN's.
_POOLINGS = {
    "max": "max",
    "avg_np": "avg_np",
    "avg_p": "avg_p",
    "pooling_max": "max",
    "pooling_avg_exclude_padding": "avg_np",
    "pooling_avg_include_padding": "avg_p",
}
_PROBLEM = re.compile(r"^(?:(?:g|mb|ic|oc|[io][dhw]|[ksdp][dhw])\d{1,12}_?){2,40}(?:n\S*)?$")
_DRIVERS: Mapping[str, Kind] = {
    "--conv": "conv",
    "--deconv": "deconv",
    "--pool": "pool",
    "--separable": "separable",
}
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_DIRECTIONS = {
    "FWD_B": "conv_fwd",
    "FWD_D": "conv_fwd",
    "FWD_I": "conv_fwd",
    "BWD_D": "conv_bwd_data",
    "BWD_W": "grouped_conv_bwd_weight",
    "BWD_WB": "grouped_conv_bwd_weight",
    "BWD_DW": "conv_backward",
}
_CHANNELS_LAST = {"axb", "nwc", "nhwc", "ndhwc"}
_LAST_NAMES = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
# Options that control measurement and output, not the layer.
_IGNORED = (
    "--mode",
    "--engine",
    "--reset",
    "--perf-template",
    "--fix-times-per-prb",
    "--max-ms-per-prb",
    "--repeats-per-prb",
    "--mem-check",
    "--memory-kind",
    "--fast-ref",
    "--canonical",
    "--wtag",
    "--skip-impl",
    "--allow-enum-tags-only",
    "-v",
)


def looks_like_benchdnn(text: str) -> bool:
    """Return whether the last word is a problem string, or the first names a driver."""
    words = text.split()
    return bool(words) and (_PROBLEM.match(words[-1]) is not None or words[0] in _DRIVERS)


def parse_benchdnn(text: str) -> Layer:
    """Parse a problem string, optionally preceded by command-line options.

    Raises
    ------
    MalformedRequest
        An option or a field is unknown, or sizes are missing that cannot be inferred.
    """
    words = text.split()
    if words and words[0].endswith("benchdnn"):
        words = words[1:]
    kind: Kind | None = None
    options: dict[str, str] = {}
    for word in words[:-1]:
        option, _, value = word.partition("=")
        if word in _DRIVERS:
            kind = _DRIVERS[word]
        elif option in ("--dt", "--dir", "--stag", "--dtag", "--tag", "--mb", "--cfg", "--alg"):
            options[option] = value
        elif not option.startswith(_IGNORED):
            raise MalformedRequest(
                f"benchdnn option {word[:64]!r} is not supported; expected --conv, --deconv, "
                "--pool, --dt, --dir, --stag or --mb before the problem"
            )
    if not words or _PROBLEM.match(words[-1]) is None:
        raise MalformedRequest(
            f"{text[:64]!r} does not end in a benchdnn problem; expected one such as "
            "mb32ic64ih56oc64oh56kh3ph1"
        )
    fields, name = _fields(words[-1])
    kind = kind or ("conv" if "oc" in fields else "pool")
    algorithm = ""
    if kind == "pool":
        said = options.get("--alg", "max").lower()
        if said not in _POOLINGS:
            raise MalformedRequest(
                f"benchdnn pooling {said[:32]!r}; expected one of {', '.join(_POOLINGS)}"
            )
        algorithm = _POOLINGS[said]
        kind = "pool" if algorithm == "max" else "avg_pool"
    if (batch := options.get("--mb", "")) != "":
        if not batch.isdecimal() or len(batch) > 12:
            raise MalformedRequest(f"benchdnn option --mb is {batch[:32]!r}; expected a number")
        fields["mb"] = int(batch)
    return _layer(kind, fields, name, options, include_padding=algorithm != "avg_np")


def to_benchdnn(layer: Layer) -> str:
    """Format a layer as a problem string, preceded by the driver option unless a convolution.

    Padding that no window reaches is omitted; the ``output_padding`` of a transposed convolution
    follows from the sizes.
    """
    letters = "dhw"[3 - layer.ndim :]
    parts = [] if layer.groups == 1 else [f"g{layer.groups}"]
    parts += [f"mb{layer.batch}", f"ic{layer.in_channels}"]
    parts += _each("i", letters, layer.input_size)
    if layer.kind == "adaptive_pool":
        raise MalformedRequest("benchdnn has no problem for an adaptive pooling")
    if layer.kind == "avg_pool" and layer.ceil_mode and layer.count_include_pad:
        # As padding, what ceil_mode adds would count in the divisor.
        raise MalformedRequest("benchdnn has no problem for an average pooling with ceil_mode")
    if not layer.pools:
        parts.append(f"oc{layer.out_channels}")
    parts += _each("o", letters, layer.output_size)
    parts += _each("k", letters, layer.kernel_size)
    if set(layer.stride) != {1}:
        parts += _each("s", letters, layer.stride)
    if set(layer.dilation) != {1}:
        parts += _each("d", letters, [d - 1 for d in layer.dilation])
    parts += _each("p", letters, [before for before, _ in layer.padding])
    text = "".join(parts)
    if layer.kind == "avg_pool":
        return f"--pool --alg=avg_{'p' if layer.count_include_pad else 'np'} {text}"
    return text if layer.kind == "conv" else f"--{layer.kind} {text}"


def _each(prefix: str, letters: str, values: Sequence[int]) -> list[str]:
    """Format one value per dimension, or a single one if all are equal."""
    if len(set(values)) == 1:
        return [f"{prefix}{letters[0]}{values[0]}"]
    return [f"{prefix}{letter}{value}" for letter, value in zip(letters, values, strict=True)]


def _fields(problem: str) -> tuple[dict[str, int], str | None]:
    fields: dict[str, int] = {}
    at = 0
    while (found := _FIELD.match(problem, at)) is not None:
        if found[1] in fields:
            raise MalformedRequest(f"benchdnn problem {problem[:64]!r} has {found[1]} twice")
        fields[found[1]] = int(found[2])
        at = found.end()
    rest = problem[at:]
    return fields, rest[1:].strip('"') or None if rest.startswith("n") else None


def _layer(
    kind: Kind,
    fields: Mapping[str, int],
    name: str | None,
    options: Mapping[str, str],
    *,
    include_padding: bool,
) -> Layer:
    ndim = 3 if any(f"{x}d" in fields for x in "iok") else 2
    if ndim == 2 and not any(f"{x}h" in fields for x in "iok"):
        ndim = 1
    letters = "dhw"[3 - ndim :]
    axes = [_axis(kind, fields, letter, letters) for letter in letters]
    in_channels = fields.get("ic", 0)
    groups = fields.get("g", 1)
    layer = Layer(
        kind=kind,
        batch=fields.get("mb", 2),  # benchdnn's default
        in_channels=in_channels,
        out_channels=in_channels if kind in ("pool", "avg_pool") else fields.get("oc", 0),
        groups=groups,
        input_size=tuple(axis["i"] for axis in axes),
        kernel_size=tuple(axis["k"] for axis in axes),
        stride=tuple(axis["s"] for axis in axes),
        padding=tuple((axis["p"], axis["after"]) for axis in axes),
        dilation=tuple(axis["d"] + 1 for axis in axes),
        output_padding=tuple(axis["more"] for axis in axes),
        count_include_pad=include_padding,
        dtype=_dtype(options),
        layout=_LAST_NAMES[ndim] if _is_channels_last(options) else None,
        operation=_operation(kind, options.get("--dir"), ndim),
        name=name,
    )
    stated = [fields.get(f"o{letter}") for letter in letters]
    for letter, wanted, found in zip(letters, stated, layer.output_size, strict=True):
        if wanted is not None and wanted != found:
            raise MalformedRequest(f"o{letter} is {wanted}; the other sizes make it {found}")
    return layer


def _axis(kind: Kind, fields: Mapping[str, int], letter: str, letters: str) -> dict[str, int]:
    """Return the numbers of one dimension; an omitted dimension copies the one before it."""

    def said(what: str, default: int | None) -> int | None:
        for other in (letter, *reversed(letters[: letters.index(letter)])):
            if f"{what}{other}" in fields:
                return fields[f"{what}{other}"]
        # A field such as ``iw`` alone does not apply to other dimensions.
        return default

    k, s, d = said("k", None), said("s", 1) or 1, said("d", 0) or 0
    size, out, pad = said("i", None), said("o", None), said("p", None)
    if k is None or (size is None and out is None):
        raise MalformedRequest(
            f"benchdnn problem says neither k{letter} nor enough of i{letter} and o{letter}"
        )
    reach = (d + 1) * (k - 1) + 1
    if kind == "deconv":
        return _transposed_axis(size, out, k, s, d, pad, reach)
    if size is None:
        assert out is not None  # noqa: S101
        size = max(1, (out - 1) * s + reach - 2 * (pad or 0))
    if out is None:
        out = (size + 2 * (pad or 0) - reach) // s + 1
    all_padding = max(0, (out - 1) * s + reach - size)
    before = all_padding // 2 if pad is None else pad
    after = padding_after(size, out, before, s, reach)
    if after > before and after >= reach:
        raise MalformedRequest(
            f"o{letter} is {out}; from i{letter} {size}, k{letter} {k}, s{letter} {s} and "
            f"p{letter} {before} expected {(size + 2 * before - reach) // s + 1}"
        )
    return {"i": size, "k": k, "s": s, "d": d, "p": before, "after": after, "more": 0}


def _transposed_axis(
    size: int | None, out: int | None, k: int, s: int, d: int, pad: int | None, reach: int
) -> dict[str, int]:
    if size is None:
        raise MalformedRequest("a transposed convolution needs the size of its input (id, ih, iw)")
    whole = (size - 1) * s + reach
    if out is None:
        out = whole - 2 * (pad or 0)
    before = max(0, whole - out) // 2 if pad is None else pad
    after = whole - before - out
    # Negative padding after the input is what PyTorch calls output_padding.
    more, after = max(0, -after), max(0, after)
    return {"i": size, "k": k, "s": s, "d": d, "p": before, "after": after, "more": more}


def _dtype(options: Mapping[str, str]) -> DType | None:
    said = options.get("--dt") or options.get("--cfg")
    if said is None:
        return None
    first = said.split(":")[0]
    if first not in _DTYPES:
        raise MalformedRequest(
            f"benchdnn data type {first[:32]!r}; expected one of {', '.join(_DTYPES)}"
        )
    return DType(_DTYPES[first])


def _is_channels_last(options: Mapping[str, str]) -> bool:
    tags = [options[name] for name in ("--stag", "--dtag", "--tag") if name in options]
    found = {tag in _CHANNELS_LAST for tag in tags if tag != "any"}
    if len(found) > 1:
        raise MalformedRequest(
            f"benchdnn tags {' and '.join(tags)[:64]}; expected one layout for all tensors"
        )
    return True in found


def _operation(kind: Kind, direction: str | None, ndim: int) -> str | None:
    if direction is None:
        return None
    if direction not in _DIRECTIONS:
        raise MalformedRequest(
            f"benchdnn direction {direction[:32]!r}; expected one of {', '.join(_DIRECTIONS)}"
        )
    if kind in ("pool", "avg_pool"):
        name = f"maxpool{ndim}d" if kind == "pool" else "avg_pool"
        return f"{name}_{'fwd' if direction.startswith('FWD') else 'bwd'}"
    return _DIRECTIONS[direction] if kind == "conv" else None
