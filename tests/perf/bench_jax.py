"""Convolutions in jitted JAX programs, gradients and forward pass: ours compared with `jax.lax`'s.

bfloat16, images in NHWC and weights in HWIO, as `flax.linen.Conv` has them. A program computes the
layer on several sets of tensors, so that its dispatch costs a layer little. Needs JAX with CUDA and
a GPU::

    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m tests.perf.bench_jax --out jax.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import convgrad.jax as ours
from tests.perf.provenance import origin

SETS = 6  # of tensors
ROUNDS = 6  # of each way by turns; the least time counts, since dispatching varies
WAYS: dict[str, Any] = {"ours": ours.conv_general_dilated, "peer": lax.conv_general_dilated}


class Layer(NamedTuple):
    size: int
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    groups: int = 1


LAYERS = {
    "ResNet-50 stem 7x7/2": Layer(224, 3, 64, 7, 2),
    "ResNet-50 stage 1, 1x1": Layer(56, 64, 256, 1),
    "ResNet-50 stage 1, 3x3": Layer(56, 64, 64, 3),
    "ResNet-50 stage 2, 3x3/2": Layer(56, 128, 128, 3, 2),
    "ResNet-50 stage 2, 3x3": Layer(28, 128, 128, 3),
    "ResNet-50 stage 3, 3x3": Layer(14, 256, 256, 3),
    "ResNet-50 stage 3, 1x1": Layer(14, 1024, 256, 1),
    "ResNet-50 stage 4, 3x3": Layer(7, 512, 512, 3),
    "ConvNeXt stage 1, depthwise 7x7": Layer(56, 96, 96, 7, groups=96),
    "ConvNeXt stage 3, depthwise 7x7": Layer(14, 384, 384, 7, groups=384),
    "RegNetY stage 3, grouped 3x3": Layer(28, 216, 216, 3, groups=9),
}


def programs(layer: Layer, conv: Callable[..., Any]) -> dict[str, Any]:
    """Return a layer's gradients and its forward pass, each jitted for `SETS` sets of tensors."""
    pad = (layer.kernel - 1) // 2
    options: dict[str, Any] = {
        "window_strides": (layer.stride,) * 2,
        "padding": [(pad, pad)] * 2,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": layer.groups,
    }
    run = partial(conv, **options)
    return {
        "gradients": jax.jit(
            lambda grads, xs, ws: [
                jax.vjp(run, x, w)[1](g) for g, x, w in zip(grads, xs, ws, strict=True)
            ]
        ),
        "forward": jax.jit(lambda _, xs, ws: [run(x, w) for x, w in zip(xs, ws, strict=True)]),
    }


def tensors(layer: Layer, batch: int) -> tuple[list[jax.Array], ...]:
    random = np.random.default_rng(0)
    size = (layer.size - layer.kernel + 2 * ((layer.kernel - 1) // 2)) // layer.stride + 1

    def draw(*shape: int) -> list[jax.Array]:
        drawn = (random.standard_normal(shape, "float32") for _ in range(SETS))
        return [jnp.asarray(each).astype("bfloat16") for each in drawn]

    weight = (layer.kernel, layer.kernel, layer.inputs // layer.groups, layer.outputs)
    return (
        draw(batch, size, size, layer.outputs),
        draw(batch, layer.size, layer.size, layer.inputs),
        draw(*weight),
    )


def compiled(batch: int) -> dict[tuple[str, str, str], Any]:
    """Return the programs by layer, way and kind.

    They are compiled one at a time: XLA times its own kernels on the GPU to choose among them. Ours
    are compiled in the background from when a program is lowered.
    """
    lowered = {}
    for name, layer in LAYERS.items():
        given = tensors(layer, batch)
        for way, conv in WAYS.items():
            for kind, program in programs(layer, conv).items():
                lowered[name, way, kind] = program.lower(*given), given
    return {key: (program.compile(), given) for key, (program, given) in lowered.items()}


def layer_us(program: Any, given: Any, calls: int) -> float:
    jax.block_until_ready(program(*given))
    started = time.perf_counter()
    for _ in range(calls):
        found = program(*given)
    jax.block_until_ready(found)
    return (time.perf_counter() - started) / calls / SETS * 1e6


def measure(name: str, every: dict[tuple[str, str, str], Any]) -> dict[str, float]:
    least: dict[str, float] = {}
    for kind in ("gradients", "forward"):
        for turn in range(ROUNDS):
            for way in WAYS:
                program, given = every[name, way, kind]
                field = f"{way}_{kind}_us"
                calls = 3 if turn == 0 else max(3, int(0.02e6 / (least[field] * SETS)))
                us = layer_us(program, given, calls)
                least[field] = min(least.get(field, us), us)
    return {field: round(us, 1) for field, us in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    options = parser.parse_args()
    where = origin(jax.devices()[0].device_kind, {"jax": jax.__version__})
    where |= {"git_sha": options.git_sha} if options.git_sha else {}
    every = compiled(options.batch)
    print(f"us of a layer at batch {options.batch}: both gradients, forward; ours / jax.lax")
    for name in LAYERS:
        us = measure(name, every)
        row = {"bench": "jax", "layer": name, **LAYERS[name]._asdict(), "batch": options.batch}
        row |= {"dtype": "bfloat16", "layout": "NHWC", **us, "peer": f"JAX {jax.__version__}"}
        said = [
            f"{us[f'ours_{kind}_us']:8.1f} / {us[f'peer_{kind}_us']:8.1f} = "
            f"{us[f'peer_{kind}_us'] / us[f'ours_{kind}_us']:5.2f}x"
            for kind in ("gradients", "forward")
        ]
        print(f"{name:32}", *said, sep="   ", flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **where}) + "\n")


if __name__ == "__main__":
    main()
