"""A client that keeps calls of one layer in flight, to load a server that computes for real.

Run as a program of its own, several beside each other: ``python -m tests.perf.serve.load URL``. It
warms up, says so by a line, waits for a line to begin, and prints as JSON when each call ended, how
long it took, and a checksum of its answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import convgrad
from convgrad.dtypes import DType

__all__ = ["SUITE", "layer_named", "shapes_of"]

SUITE = Path(__file__).parents[1] / "suite" / "layers.json"


def layer_named(name: str, batch: int | None = None) -> dict[str, Any]:
    """A layer of the suite, with another batch if one is given."""
    (layer,) = (each for each in json.loads(SUITE.read_text()) if each["name"] == name)
    return layer if batch is None else {**layer, "N": batch}


def shapes_of(layer: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of its bwd_data in channels-last order, by name."""
    return {
        "grad_output": (layer["N"], *layer["output_size"], layer["K"]),
        "weight": (layer["K"], *layer["kernel_size"], layer["C"] // layer["groups"]),
        "grad_input": (layer["N"], *layer["input_size"], layer["C"]),
    }


class Caller:
    """One thread's client and tensors."""

    def __init__(self, arguments: argparse.Namespace, layer: dict[str, Any], seed: int) -> None:
        self._layer = layer
        self._client = convgrad.Client(
            arguments.url, transport=arguments.transport, timeout=120, retries=0
        )
        shapes = shapes_of(layer)
        draw = np.random.default_rng(seed)
        self._tensors: dict[str, NDArray[Any]] = {}
        for name in ("grad_output", "weight"):
            tensor = self._client.empty(shapes[name], DType.BFLOAT16.numpy)
            tensor[...] = draw.integers(-2, 3, shapes[name], np.int8)
            self._tensors[name] = tensor

    def call(self) -> NDArray[Any]:
        layer = self._layer
        return self._client.conv_bwd_data(
            self._tensors["grad_output"],
            self._tensors["weight"],
            stride=layer["stride"],
            padding=layer["padding"],
            dilation=layer["dilation"],
            input_size=layer["input_size"],
            layout="NHWC",
        )

    def close(self) -> None:
        self._client.close()


def checksum(answer: NDArray[Any]) -> int:
    return zlib.crc32(answer.view(np.uint8).data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--layer", default="ck_headline")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--transport", default="http", choices=("http", "shm"))
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=3, help="calls of each thread")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    layer = layer_named(arguments.layer, arguments.batch)
    began, barrier = threading.Event(), threading.Barrier(arguments.threads + 1)
    until_s = [0.0]

    def work(_: int) -> tuple[list[tuple[float, float]], list[int]]:
        caller = Caller(arguments, layer, seed=0)
        sums = []
        for _ in range(arguments.warm_up):
            answer = caller.call()
        sums.append(checksum(answer))
        # Nothing of it may be alive when memory is measured or reused.
        del answer
        barrier.wait()
        began.wait()
        times = []
        while (start_s := time.monotonic()) < until_s[0]:
            answer = caller.call()
            end_s = time.monotonic()
            # What ends later ran beside fewer others.
            if end_s <= until_s[0]:
                times.append((end_s, end_s - start_s))
        sums.append(checksum(answer))
        caller.close()
        return times, sums

    with ThreadPoolExecutor(arguments.threads) as threads:
        working = [threads.submit(work, index) for index in range(arguments.threads)]
        while barrier.n_waiting < arguments.threads:
            if any(each.done() for each in working):
                next(each for each in working if each.done()).result()
            time.sleep(0.01)
        barrier.wait()
        print("ready", flush=True)
        sys.stdin.readline()
        until_s[0] = time.monotonic() + arguments.seconds
        began.set()
        found = [each.result() for each in working]
    times = [each for times, _ in found for each in times]
    sums = [each for _, sums in found for each in sums]
    json.dump({"times": times, "sums": sums}, sys.stdout)


if __name__ == "__main__":
    main()
