"""The convolutions of timm's networks as a suite, to measure networks that nothing was tuned for.

    python -m tests.perf.model_layers hrnet_w18 ghostnet_100 --out layers.json
    python -m tests.perf.bench_networks --suite layers.json --batches 2 16 --results rows.jsonl

Layers of the networks suite are left out. Each network is called once, on an image of its default
size; its weights are random. Needs PyTorch and timm, and no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch

from convgrad.torch import layers_of

SUITE = Path(__file__).resolve().parent / "suite" / "networks.json"
# Channels of an image.
FIRST_CHANNELS = 4


def entry_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """As `suite/networks.json` has a layer, without the networks."""
    ndim, groups = layer["ndim"], layer["groups"]
    padding = [max(pair) if isinstance(pair, list) else pair for pair in layer["padding"]]
    reach = [d * (k - 1) + 1 for d, k in zip(layer["dilation"], layer["kernel_size"], strict=True)]
    sizes = zip(layer["input_size"], padding, reach, layer["stride"], strict=True)
    by = {name: "x".join(map(str, layer[name])) for name in ("input_size", "kernel_size")}
    name = (
        f"{layer['C']}>{layer['K']}g{groups}_{by['input_size']}_k{by['kernel_size']}"
        f"_s{layer['stride'][0]}_d{layer['dilation'][0]}"
    )
    same = [d * (k // 2) for d, k in zip(layer["dilation"], layer["kernel_size"], strict=True)]
    if padding != same:
        name += f"_p{'x'.join(map(str, padding))}"
    fields = ("kind", "C", "K", "groups", "input_size", "kernel_size", "stride", "dilation")
    return {
        "name": name,
        "ndim": ndim,
        **{field: layer[field] for field in fields},
        "padding": padding,
        "output_size": [(size + 2 * pad - far) // step + 1 for size, pad, far, step in sizes],
        "class": _class_of(layer),
    }


def _class_of(layer: Mapping[str, Any]) -> str:
    if layer["groups"] > 1:
        return "depthwise" if layer["groups"] == layer["C"] else "grouped"
    return "first" if layer["C"] <= FIRST_CHANNELS else "dense"


def suite_of(names: list[str]) -> list[dict[str, Any]]:
    """The distinct layers of these networks, each with how often a network has it."""
    listed = {layer["name"] for layer in json.loads(SUITE.read_text(encoding="utf-8"))}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        network = timm.create_model(name)
        image = torch.zeros(1, *timm.data.resolve_model_data_config(network)["input_size"])
        for layer in layers_of(network, image)["layers"]:
            if layer["kind"] != "conv":
                continue
            entry = entry_of(layer)
            if entry["name"] not in listed:
                kept = found.setdefault(entry["name"], {**entry, "networks": {}})
                kept["networks"][name] = kept["networks"].get(name, 0) + layer["count"]
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", help="timm's names")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    layers = suite_of(given.networks)
    given.out.write_text(json.dumps(layers, indent=1) + "\n", encoding="utf-8")
    print(f"{len(layers)} layers that the networks suite does not have")


if __name__ == "__main__":
    main()
