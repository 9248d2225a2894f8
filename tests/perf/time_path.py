"""How long a request takes on its way through a server, the kernel's own time left out.

    python -m tests.perf.time_path [--workers 2] [--repeats 30]

Starts ``convgrad serve`` and sends, one at a time, max pools of 64 MiB that answer with 4 MiB and
of 1 KiB, with the SDK and with a bare socket (one scatter-gather send, one receiving loop). Prints
median milliseconds; stores nothing.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np

from convgrad import Client, calls
from convgrad.wire import safetensors
from tests.support.http_server import serving_process

SIZES = {"64 MiB in, 4 MiB out": (1, 16, 1024, 1024), "1 KiB in, 64 B out": (1, 1, 16, 16)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default=None, help="CONVGRAD_HTTP_WORKERS")
    parser.add_argument("--repeats", type=int, default=30)
    chosen = parser.parse_args()
    environment = {} if chosen.workers is None else {"CONVGRAD_HTTP_WORKERS": chosen.workers}
    with TemporaryDirectory() as folder, serving_process(Path(folder), environment) as (url, _):
        for title, shape in SIZES.items():
            array = np.ones(shape, np.float32)
            repeats = chosen.repeats if array.nbytes > 10**6 else 20 * chosen.repeats
            for name, once in {"SDK": _sdk(url, array), "socket": _bare(url, array)}.items():
                times = [once() for _ in range(repeats)][repeats // 5 :]
                total_ms = statistics.median(total for total, _ in times) * 1e3
                path_ms = statistics.median(total - compute for total, compute in times) * 1e3
                print(f"{title:22} {name:7} total {total_ms:8.3f} ms   path {path_ms:8.3f} ms")


def _sdk(url: str, array: np.ndarray) -> Callable[[], tuple[float, float]]:
    client = Client(url)

    def once() -> tuple[float, float]:
        started = time.perf_counter()
        answer = client.call(calls.maxpool2d_fwd(array, kernel_size=4))
        return time.perf_counter() - started, answer.report.compute_s

    return once


def _bare(url: str, array: np.ndarray) -> Callable[[], tuple[float, float]]:
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    parameters = {"parameters": json.dumps({"kernel_size": 4})}
    chunks = safetensors.encode({"input": array}, parameters)
    head = (
        "POST /maxpool2d_fwd HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.safetensors\r\n"
        f"Content-Length: {safetensors.total_bytes(chunks)}\r\n\r\n"
    ).encode()
    answer = bytearray(array.nbytes + 65536)

    def once() -> tuple[float, float]:
        started = time.perf_counter()
        left = [memoryview(head), *(memoryview(chunk).cast("B") for chunk in chunks)]
        while left:
            sent = connection.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]
        size, end = 0, 0
        while not end or size < end:
            size += connection.recv_into(memoryview(answer)[size:])
            if not end and (at := answer.find(b"\r\n\r\n", 0, size)) >= 0:
                text = bytes(answer[:at]).lower()
                assert text.startswith(b"http/1.1 200"), text
                end = at + 4 + int(text.split(b"content-length: ")[1].split(b"\r\n")[0])
        took = time.perf_counter() - started
        _, metadata = safetensors.decode(memoryview(answer)[at + 4 : end])
        return took, json.loads(metadata["report"])["compute_s"]

    return once


if __name__ == "__main__":
    main()
