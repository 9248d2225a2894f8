"""The client's side: every way to send one tensor and have the answer as an array.

Run as a program of its own (``python -m tests.perf.serve.paths``), so that the client's malloc can
be set too. All paths have their turns in every round: what the machine does meanwhile falls on all
of them alike. Prints the seconds of every call that counts as JSON.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import shared_memory

import convgrad
from tests.perf.serve.servers import Addresses
from tests.perf.serve.sizes import OPERATION, SIZES, Size

Array = NDArray[Any]
Path = Callable[[], Array]
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_REGION_NUMBERS = itertools.count()


def tritonclient_path(module: Any, client: Any, size: Size, array: Array) -> Path:
    """Tensors in the message, with tritonclient's HTTP or gRPC."""

    def call() -> Array:
        given = module.InferInput("input", size.input_shape, "FP32")
        given.set_data_from_numpy(array)
        answer = client.infer(
            OPERATION,
            [given],
            outputs=[module.InferRequestedOutput("output")],
            parameters={"kernel_size": size.kernel_size},
        )
        output: Array = answer.as_numpy("output")
        return output

    return call


@contextmanager
def shared_memory_path(
    module: Any, client: Any, size: Size, array: Array, *, copies: bool
) -> Iterator[Path]:
    """Tensors in system shared memory, with tritonclient.

    With ``copies`` the client puts its array there each time and takes the answer out; without,
    the data are there already, and the answer is read where it is.
    """
    number = next(_REGION_NUMBERS)
    regions = []
    for kind, size_bytes in (("in", size.input_bytes), ("out", size.output_bytes)):
        name = f"bench_{kind}_{number}"
        regions.append(shared_memory.create_shared_memory_region(name, f"/{name}", size_bytes))
        client.register_system_shared_memory(name, f"/{name}", size_bytes)
    taken, given = regions
    shared_memory.set_shared_memory_region(taken, [array])

    def call() -> Array:
        if copies:
            shared_memory.set_shared_memory_region(taken, [array])
        source = module.InferInput("input", size.input_shape, "FP32")
        source.set_shared_memory(f"bench_in_{number}", size.input_bytes)
        target = module.InferRequestedOutput("output")
        target.set_shared_memory(f"bench_out_{number}", size.output_bytes)
        client.infer(
            OPERATION, [source], outputs=[target], parameters={"kernel_size": size.kernel_size}
        )
        output: Array = shared_memory.get_contents_as_numpy(given, np.float32, size.output_shape)
        return output.copy() if copies else output

    try:
        yield call
    finally:
        # Over gRPC Triton answers before it lets go of a region, which it then refuses to forget.
        time.sleep(0.2)
        for kind in ("in", "out"):
            client.unregister_system_shared_memory(f"bench_{kind}_{number}")
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)


def plain_json_path(http: httpx.Client, url: str, size: Size, array: Array) -> Path:
    """JSON and base64 as one writes it without an SDK: the form that our server takes too."""

    def call() -> Array:
        text = base64.b64encode(array.data).decode()
        tensor = {"data": text, "dtype": "float32", "shape": array.shape}
        body = {"input": tensor, "kernel_size": size.kernel_size, "response": "data"}
        answer = http.post(url, json=body).raise_for_status().json()["output"]
        return np.frombuffer(base64.b64decode(answer["data"]), np.float32)

    return call


def paths(at: Addresses, size: Size) -> Iterator[tuple[str, Callable[[ExitStack], Path]]]:
    """Every path: the name that the results have, and what makes it and undoes it on a stack."""
    array = np.random.default_rng(0).standard_normal(size.input_shape, np.float32)

    def sdk(stack: ExitStack, **options: Any) -> Path:
        client = stack.enter_context(convgrad.Client(f"http://127.0.0.1:{at.ours_http}", **options))
        return lambda: client.maxpool2d_fwd(array, size.kernel_size).output

    def in_place(stack: ExitStack) -> Path:
        """The array was made in shared memory, as `Client.empty` makes one."""
        url = f"http://127.0.0.1:{at.ours_http}"
        client = stack.enter_context(convgrad.Client(url, transport="shm"))
        given = client.empty(size.input_shape, "float32")
        given[...] = array
        return lambda: client.maxpool2d_fwd(given, size.kernel_size).output

    def plain(stack: ExitStack, port: int) -> Path:
        http = stack.enter_context(httpx.Client(timeout=60, trust_env=False))
        return plain_json_path(http, f"http://127.0.0.1:{port}/{OPERATION}", size, array)

    def triton(stack: ExitStack, module: Any, port: int, copies: bool | None) -> Path:
        unlimited = {"channel_args": _UNLIMITED} if module is tritonclient.grpc else {}
        client = module.InferenceServerClient(f"127.0.0.1:{port}", **unlimited)
        stack.callback(client.close)
        if copies is None:
            return tritonclient_path(module, client, size, array)
        return stack.enter_context(shared_memory_path(module, client, size, array, copies=copies))

    yield "ours, binary HTTP, SDK", sdk
    yield "ours, JSON, SDK", partial(sdk, wire="json")
    yield "ours, shared memory, SDK", in_place
    yield "ours, shared memory, SDK, with copies", partial(sdk, transport="shm")
    for server, port in (("ours", at.ours_http), ("FastAPI", at.fastapi)):
        yield f"{server}, JSON, httpx", partial(plain, port=port)
    for kind, module, ports in (
        ("HTTP", tritonclient.http, (at.ours_http, at.workers_http, at.triton_http)),
        ("gRPC", tritonclient.grpc, (at.ours_grpc, at.workers_grpc, at.triton_grpc)),
    ):
        for server, port, by in zip(
            ("ours", "ours", "Triton"), ports, ("", ", by a worker", ""), strict=True
        ):
            through = partial(triton, module=module, port=port)
            memory = f"{server}, shared memory over {kind}, tritonclient"
            yield f"{server}, {kind}, tritonclient{by}", partial(through, copies=None)
            yield f"{memory}{by}", partial(through, copies=False)
            if not by:
                yield f"{memory}, with copies", partial(through, copies=True)


def measured(found: Mapping[str, Path], size: Size) -> dict[str, list[float]]:
    """Seconds of every call, by path."""
    for name, path in found.items():
        for _ in range(3):
            if path().size * 4 != size.output_bytes:
                raise SystemExit(f"{name} gave another shape")
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(size.rounds):
        for name, path in found.items():
            path()
            for _ in range(size.counted):
                began_s = time.perf_counter()
                result = path()
                seconds[name].append(time.perf_counter() - began_s)
                del result
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("ports", type=int, nargs=7)
    parser.add_argument("--only", nargs="*", default=[""])
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    with ExitStack() as stack:
        found = {
            name: make(stack)
            for name, make in paths(Addresses(*arguments.ports), size)
            if any(wanted in name for wanted in arguments.only)
        }
        json.dump(measured(found, size), sys.stdout)


if __name__ == "__main__":
    main()
