"""Write ``peer_times.json``: what `convgrad.torch.use` leaves to PyTorch, from networks.jsonl.

    python -m tests.perf.peer_times

Of the layers on which one of the gradients is slower than PyTorch's, both gradients' times.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convgrad_service.inprocess import peer_times, problem_of
from convgrad_service.inprocess.peer_times import FASTER, layer_key
from tests.perf.records import records

HERE = Path(__file__).resolve().parent
TABLE = Path(peer_times.__file__).with_name("peer_times.json")


def tables() -> dict[str, Any]:
    suite = {
        layer["name"]: layer
        for layer in json.loads((HERE / "suite" / "networks.json").read_text(encoding="utf-8"))
    }
    layers: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(dict))
    peers: dict[str, str] = {}
    for row in records("networks"):
        problem = _problem(suite[row["layer"]], row)
        times = round(row["ours_ms"] * 1e3, 1), round(row["peer_ms"] * 1e3, 1)
        layers[row["device"]][layer_key(problem)][row["op"]] = times
        peers[row["device"]] = row["peer"]
    return {
        device: {
            "peer": peers[device],
            "layers": {
                name: times
                for name, times in sorted(found.items())
                if any(peer < FASTER * ours for ours, peer in times.values())
            },
        }
        for device, found in layers.items()
    }


def _problem(layer: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """As `convgrad.torch` states it; the key names both gradients alike."""
    spatial = "DHW"[-layer["ndim"] :]
    batch, channels, dtype = row["batch"], layer["C"] // layer["groups"], row["dtype"]
    parameters = {
        **{name: layer[name] for name in ("input_size", "stride", "padding", "dilation", "groups")},
        "layout": f"N{spatial}C" if row["layout"] == "NHWC" else f"NC{spatial}",
    }
    grad_output, weight = (batch, layer["K"]), (layer["K"], channels)
    sizes = layer["output_size"], layer["kernel_size"]
    shapes = (
        (shape[0], *size, shape[1]) if row["layout"] == "NHWC" else (*shape, *size)
        for shape, size in zip((grad_output, weight), sizes, strict=True)
    )
    tensors = {
        name: (shape, dtype) for name, shape in zip(("grad_output", "weight"), shapes, strict=True)
    }
    return problem_of("conv_bwd_data", tensors, parameters)


def main() -> None:
    # A line for each layer, so that a change can be read.
    devices = []
    for device, table in tables().items():
        layers = (f"{json.dumps(key)}: {json.dumps(each)}" for key, each in table["layers"].items())
        body = ",\n".join(layers)
        peer = json.dumps(table["peer"])
        devices.append(f'{json.dumps(device)}: {{"peer": {peer}, "layers": {{\n{body}\n}}}}')
    TABLE.write_text("{" + ",\n".join(devices) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
