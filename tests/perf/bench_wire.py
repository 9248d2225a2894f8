"""How fast bytes become arrays and arrays bytes: 64 MiB of tensors, stage by stage, on one core.

Run by `make bench-wire`. Prints a table and writes `tests/perf/results/wire.jsonl`, a line for
each stage, in place of the run before. Everything is measured twice: with malloc as glibc brings
it, where most of the time is page faults, and as `convgrad serve` sets it (see
`convgrad_service.server.malloc`).

The peer of a whole direction, in the same process and on the same tensors, is what a FastAPI
handler does by itself (json.loads, a pydantic model with Base64Bytes, numpy.load, and back), and
for safetensors the reference package.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import safetensors.numpy
from pydantic import Base64Bytes, BaseModel

from convgrad.contract import OPERATIONS, Report, validate
from convgrad.wire import json_tensors, npy
from convgrad.wire import safetensors as ours
from convgrad_service.http_api.codecs import parse_json_body
from convgrad_service.http_api.long_base64 import b64decode
from convgrad_service.server.malloc import keep_large_blocks
from tests.perf.provenance import cpu_model, origin
from tests.support.json_bodies import decode_json_request, encode_json_answer

RESULTS = Path(__file__).parent / "results" / "wire.jsonl"
SAMPLES = 15
PEER_SAMPLES = 5
OPERATION = OPERATIONS["conv_bwd_data"]
TENSORS = {
    "grad_output": np.random.default_rng(0).standard_normal((15, 256, 64, 64), np.float32),
    "weight": np.random.default_rng(1).standard_normal((256, 256, 4, 4), np.float32),
}
OUTPUTS = {"grad_input": np.random.default_rng(2).standard_normal((16, 256, 64, 64), np.float32)}
PARAMETERS = {"stride": 2, "padding": [1, 1], "layout": "NCHW"}
REPORT = Report(backend="cpu", kernel="dense", flops=1, bytes=1, compute_s=0.5)
TENSOR_BYTES = 64 * 2**20
KEPT_BYTES = 2**30  # as the server keeps, at most


@dataclass(frozen=True)
class Stage:
    """One thing timed: ``run``, and what a peer does for the same where one is known."""

    direction: str
    stage: str
    body_bytes: int
    run: Callable[[], Any]
    peer: str | None = None
    peer_run: Callable[[], Any] | None = None


class PeerTensor(BaseModel):
    npy: Base64Bytes


class PeerRequest(BaseModel):
    grad_output: PeerTensor
    weight: PeerTensor
    stride: int
    padding: list[int]
    layout: str


def json_decode() -> Iterator[Stage]:
    """A request's JSON body to a validated request."""
    text = json.dumps(
        {name: json_tensors.encode_tensor(array, "npy") for name, array in TENSORS.items()}
        | PARAMETERS
    ).encode()
    # As the server holds a body: a view of memory that is not a bytes object.
    body = np.frombuffer(bytearray(text), np.uint8).data
    strings = [parse_json_body(body)[name]["npy"] for name in TENSORS]
    files = [b64decode(string) for string in strings]
    fields = decode_json_request(body, OPERATION)

    def peer() -> list[Any]:
        request = PeerRequest.model_validate(json.loads(text))
        return [
            np.load(io.BytesIO(tensor.npy), allow_pickle=False)
            for tensor in (request.grad_output, request.weight)
        ]

    def stage(name: str, run: Callable[[], Any]) -> Stage:
        return Stage("JSON request to arrays", name, len(text), run)

    yield stage("scan", lambda: parse_json_body(body))
    yield stage("base64", lambda: [b64decode(string) for string in strings])
    yield stage("npy view", lambda: [npy.decode(file, name="x") for file in files])
    yield stage("validate", lambda: validate(OPERATION.request, fields))
    yield Stage(
        "JSON request to arrays",
        "total",
        len(text),
        lambda: validate(OPERATION.request, decode_json_request(body, OPERATION)),
        "json.loads, pydantic Base64Bytes, numpy.load",
        peer,
    )


def json_encode() -> Iterator[Stage]:
    """An answer's arrays to the chunks of its JSON body."""
    array = OUTPUTS["grad_input"]
    body_bytes = ours.total_bytes(encode_json_answer(OUTPUTS, REPORT, "npy"))

    def peer() -> bytes:
        file = io.BytesIO()
        np.save(file, array)
        tensor = {"npy": base64.b64encode(file.getvalue()).decode()}
        return json.dumps({"grad_input": tensor, "report": REPORT.model_dump()}).encode()

    yield Stage("arrays to JSON answer", "npy header", body_bytes, lambda: npy.encode(array))
    yield Stage(
        "arrays to JSON answer", "base64", body_bytes, lambda: pybase64.b64encode(array.data)
    )
    yield Stage(
        "arrays to JSON answer",
        "total",
        body_bytes,
        lambda: encode_json_answer(OUTPUTS, REPORT, "npy"),
        "numpy.save, base64, json.dumps",
        peer,
    )


def safetensors_both_ways() -> Iterator[Stage]:
    """A safetensors body to a validated request, and an answer's arrays to one."""
    whole = b"".join(ours.encode(TENSORS, {"parameters": json.dumps(PARAMETERS)}))
    body = np.frombuffer(bytearray(whole), np.uint8).data

    def request() -> Any:
        tensors, metadata = ours.decode(body)
        return validate(OPERATION.request, {**ours.parameters(metadata), **tensors})

    yield Stage(
        "safetensors request to arrays",
        "total",
        len(whole),
        request,
        "safetensors.numpy.load",
        lambda: safetensors.numpy.load(whole),
    )
    yield Stage(
        "arrays to safetensors answer",
        "total",
        len(whole),
        lambda: ours.encode(OUTPUTS, {"report": REPORT.model_dump_json()}),
        "safetensors.numpy.save",
        lambda: safetensors.numpy.save(OUTPUTS, {"report": REPORT.model_dump_json()}),
    )


def median_ms(run: Callable[[], Any], samples: int) -> float:
    run()
    timed = []
    for _ in range(samples):
        began_s = time.perf_counter()
        result = run()
        timed.append(time.perf_counter() - began_s)
        del result  # before the next sample, as a server frees one body before the next
    return statistics.median(timed) * 1e3


def measured(stage: Stage, malloc: str) -> dict[str, Any]:
    ours_ms = median_ms(stage.run, SAMPLES)
    peer_ms = median_ms(stage.peer_run, PEER_SAMPLES) if stage.peer_run else None
    return {
        "bench": "wire",
        "op": OPERATION.name,
        "direction": stage.direction,
        "stage": stage.stage,
        "malloc": malloc,
        "dtype": "float32",
        "bytes": TENSOR_BYTES,
        "body_bytes": stage.body_bytes,
        "ours_ms": round(ours_ms, 4),
        "gb_per_s": round(TENSOR_BYTES / ours_ms / 1e6, 2),
        "body_gb_per_s": round(stage.body_bytes / ours_ms / 1e6, 2),
        "peer": stage.peer,
        "peer_ms": None if peer_ms is None else round(peer_ms, 3),
        "samples": SAMPLES,
    }


def show(records: list[dict[str, Any]]) -> None:
    print("64 MiB of float32 tensors, medians; GB/s of tensor bytes and of body bytes")
    print(f"{'':31}{'':12}{'malloc':9}{'ms':>9}{'GB/s':>10}{'body':>8}{'peer ms':>10}")
    for record in records:
        peer_ms = record["peer_ms"]
        # A rate of something that looks at a header alone says nothing.
        rates = [
            f"{record[key]:.2f}" if record["ours_ms"] > 0.5 else "no copy"
            for key in ("gb_per_s", "body_gb_per_s")
        ]
        print(
            f"{record['direction']:31}{record['stage']:12}{record['malloc']:9}"
            f"{record['ours_ms']:9.3f}{rates[0]:>10}{rates[1]:>8}"
            f"{'' if peer_ms is None else f'{peer_ms:.1f}':>10}"
        )


def main() -> None:
    records = []
    for malloc in ("default", "served"):
        if malloc == "served" and not keep_large_blocks(KEPT_BYTES):
            print("this libc's malloc has no such settings: measured as it is, alone")
            break
        for stages in (json_decode, json_encode, safetensors_both_ways):
            records += [measured(stage, malloc) for stage in stages()]
    packages = ("numpy", "pybase64", "pydantic", "safetensors")
    stamp = origin(cpu_model(), {package: version(package) for package in packages})
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(record | stamp) + "\n" for record in records))
    show(records)


if __name__ == "__main__":
    main()
