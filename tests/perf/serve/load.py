"""A client that keeps calls of one layer in flight, to load a server that computes for real.

Run as a program of its own, several beside each other: ``python -m tests.perf.serve.load URL``. It
warms up, says so by a line, waits for a line to begin, and prints as JSON when each call ended, how
long it took, a checksum of its answers, how many calls there were in all and what they cost it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

import convgrad
from convgrad.dtypes import DType
from tests.perf.serve.processes import Spent, spent_by

__all__ = ["SUITE", "layer_named", "shapes_of"]

SUITE = Path(__file__).parents[1] / "suite" / "layers.json"


def layer_named(name: str, batch: int | None = None) -> dict[str, Any]:
    """A layer of the suite, with another batch if one is given."""
    (layer,) = (each for each in json.loads(SUITE.read_text()) if each["name"] == name)
    return layer if batch is None else {**layer, "N": batch}


def shapes_of(layer: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of its gradients in channels-last order, by name."""
    return {
        "input": (layer["N"], *layer["input_size"], layer["C"]),
        "grad_output": (layer["N"], *layer["output_size"], layer["K"]),
        "weight": (layer["K"], *layer["kernel_size"], layer["C"] // layer["groups"]),
        "grad_input": (layer["N"], *layer["input_size"], layer["C"]),
    }


class Caller:
    """One thread's client and tensors, over HTTP or through shared memory."""

    transport: Literal["http", "shm"] = "http"
    given: tuple[str, ...] = ("grad_output", "weight")

    def __init__(self, url: str, layer: dict[str, Any], number: int) -> None:
        self.layer = layer
        self.client = convgrad.Client(url, transport=self.transport, timeout=120, max_retries=0)
        shapes = shapes_of(layer)
        # Every thread the same numbers, so that all answers must be the same.
        draw = np.random.default_rng(0)
        self.tensors: dict[str, Any] = {}
        for name in self.given:
            tensor = self.client.empty(shapes[name], DType.BFLOAT16.numpy)
            tensor[...] = draw.integers(-2, 3, shapes[name], np.int8)
            self.tensors[name] = tensor

    def call(self) -> Any:
        """One answer."""
        layer = self.layer
        return self.client.conv_bwd_data(
            self.tensors["grad_output"],
            self.tensors["weight"],
            stride=layer["stride"],
            padding=layer["padding"],
            dilation=layer["dilation"],
            input_size=layer["input_size"],
            layout="NHWC",
        )

    def checksum(self, answer: Any) -> int:
        """Of an answer's elements."""
        return zlib.crc32(answer.view(np.uint8).data)

    def close(self) -> None:
        self.client.close()


class ShmCaller(Caller):
    """Tensors and answers lie in system shared memory."""

    transport = "shm"


class SumCaller(ShmCaller):
    """The weight's gradient instead: a sum over the batch."""

    given = ("input", "grad_output")

    def call(self) -> Any:
        layer = self.layer
        found = self.client.grouped_conv_bwd_weight(
            input=self.tensors["input"],
            grad_output=self.tensors["grad_output"],
            weight_size=layer["kernel_size"],
            stride=layer["stride"],
            padding=layer["padding"],
            dilation=layer["dilation"],
            layout="NHWC",
        )
        return found.grad_weight


class StoredCaller(Caller):
    """The server keeps the tensors, and the answer too: nothing but names is sent."""

    def __init__(self, url: str, layer: dict[str, Any], number: int) -> None:
        super().__init__(url, layer, number)
        for name, tensor in self.tensors.items():
            self.tensors[name] = self.client.put(f"{name}-{number}", tensor)
        self.client = self.client.with_options(store={"grad_input": f"answer-{number}"})

    def checksum(self, answer: Any) -> int:
        return super().checksum(self.client.fetch(answer.name))


class CudaCaller(Caller):
    """Tensors and answer lie in allocations of this process on the GPU; with tritonclient."""

    def __init__(self, url: str, layer: dict[str, Any], number: int) -> None:
        import tritonclient.http as triton
        from tritonclient.utils import cuda_shared_memory

        super().__init__(url, layer, number)
        self._memory = cuda_shared_memory
        self._triton = triton.InferenceServerClient(url.removeprefix("http://"))
        self._shape = shapes_of(layer)["grad_input"]
        self._given: list[Any] = []
        self._regions: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            region = self._region(f"{name}-{os.getpid()}-{number}", tensor.nbytes)
            cuda_shared_memory.set_shared_memory_region(
                self._regions[region], [tensor.view(np.uint16)]
            )
            self._given.append(triton.InferInput(name, tensor.shape, "BF16"))
            self._given[-1].set_shared_memory(region, tensor.nbytes)
        size = 2 * math.prod(self._shape)
        self._target = self._region(f"grad_input-{os.getpid()}-{number}", size)
        self._wanted = triton.InferRequestedOutput("grad_input")
        self._wanted.set_shared_memory(self._target, size)
        steps = ("stride", "padding", "dilation", "input_size")
        self._parameters = {"layout": "NHWC", **{name: json.dumps(layer[name]) for name in steps}}

    def _region(self, name: str, size_bytes: int) -> str:
        region = self._memory.create_shared_memory_region(name, size_bytes, 0)
        handle = self._memory.get_raw_handle(region)
        self._triton.register_cuda_shared_memory(name, handle, 0, size_bytes)
        self._regions[name] = region
        return name

    def call(self) -> Any:
        return self._triton.infer(
            "conv_bwd_data", self._given, outputs=[self._wanted], parameters=self._parameters
        )

    def checksum(self, answer: Any) -> int:
        target = self._regions[self._target]
        found = self._memory.get_contents_as_numpy(target, np.uint16, self._shape)
        return super().checksum(found)

    def close(self) -> None:
        for name, region in self._regions.items():
            self._triton.unregister_cuda_shared_memory(name)
            self._memory.destroy_shared_memory_region(region)
        super().close()


CALLERS = {
    "http": Caller,
    "shm": ShmCaller,
    "shm-sum": SumCaller,
    "stored": StoredCaller,
    "cuda": CudaCaller,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--layer", default="ck_headline")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--transport", default="http", choices=CALLERS)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=3, help="calls of each thread")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    layer = layer_named(arguments.layer, arguments.batch)
    began, barrier = threading.Event(), threading.Barrier(arguments.threads + 1)
    until_s = [0.0]

    spent: list[Spent] = []

    def work(number: int) -> tuple[list[tuple[float, float]], list[int], int]:
        caller = CALLERS[arguments.transport](arguments.url, layer, number)
        sums = []
        for _ in range(arguments.warm_up):
            answer = caller.call()
        sums.append(caller.checksum(answer))
        # Nothing of it may be alive when memory is measured or reused.
        del answer
        barrier.wait()
        began.wait()
        times, calls = [], 0
        while (start_s := time.monotonic()) < until_s[0]:
            answer = caller.call()
            end_s, calls = time.monotonic(), calls + 1
            # What ends later ran beside fewer others.
            if end_s <= until_s[0]:
                times.append((end_s, end_s - start_s))
        # Those who end later may still load it a little.
        spent.append(spent_by(os.getpid()))
        sums.append(caller.checksum(answer))
        caller.close()
        return times, sums, calls

    with ThreadPoolExecutor(arguments.threads) as threads:
        working = [threads.submit(work, index) for index in range(arguments.threads)]
        while barrier.n_waiting < arguments.threads:
            if any(each.done() for each in working):
                next(each for each in working if each.done()).result()
            time.sleep(0.01)
        barrier.wait()
        print("ready", flush=True)
        sys.stdin.readline()
        before = spent_by(os.getpid())
        until_s[0] = time.monotonic() + arguments.seconds
        began.set()
        found = [each.result() for each in working]
    last = max(spent, key=lambda each: each.cpu_s)
    json.dump(
        {
            "times": [each for times, _, _ in found for each in times],
            "sums": [each for _, sums, _ in found for each in sums],
            "calls": sum(calls for _, _, calls in found),
            "spent": dataclasses.astuple(last - before),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
