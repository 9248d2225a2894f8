"""NumPy's files as they are: curl sends .npy and gets .npy or .npz, with no JSON in between."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import Client
from convgrad.contract import OPERATIONS
from convgrad.wire.json_tensors import decode_tensor, encode_tensor
from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import LiveServer, serving

RNG = np.random.default_rng(20)
WEIGHT = RNG.standard_normal((4, 2, 3, 3)).astype(np.float32)
GRAD_OUTPUT = RNG.standard_normal((2, 4, 8, 8)).astype(np.float32)
NPY, NPZ = "application/x-npy", "application/x-npz"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(CpuBackend(), max_json_bytes="2MiB") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[Client]:
    with Client(live.url) as client:
        yield client


def npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def load(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def curl(live: LiveServer, path: str, *arguments: str) -> bytes:
    command = ["curl", "-sS", "--fail-with-body", *arguments, f"{live.url}/{path}"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def post(live: LiveServer, path: str, files: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{live.url}/{path}", files=files, headers=headers, timeout=60)


def test_curl_sends_and_gets_npy(live: LiveServer, client: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", WEIGHT)
    np.save(tmp_path / "g.npy", GRAD_OUTPUT)
    files = ["-F", f"weight=@{tmp_path}/w.npy", "-F", f"grad_output=@{tmp_path}/g.npy"]
    parameters = ["-F", "stride=2", "-F", "padding=[1, [1, 0]]", "-F", "input_size=[15, 16]"]
    answer = curl(live, "conv_bwd_data", *files, *parameters, "-H", f"Accept: {NPY}")
    expected = client.conv_bwd_data(
        GRAD_OUTPUT, WEIGHT, stride=2, padding=(1, (1, 0)), input_size=(15, 16)
    )
    np.testing.assert_array_equal(load(answer), expected)


def test_without_accept_the_answer_is_npz(live: LiveServer, client: Client) -> None:
    x = RNG.standard_normal((2, 2, 8, 8)).astype(np.float32)
    files = {"input": npy(x), "kernel_size": b"2", "return_indices": b"true"}
    answer = post(live, "maxpool2d_fwd", files)
    assert answer.headers["content-type"] == NPZ
    assert json.loads(answer.headers["x-report"])["backend"] == "cpu"
    expected = client.maxpool2d_fwd(x, kernel_size=2, return_indices=True)
    archive = load(answer.content)
    assert archive.files == ["output", "indices"]
    np.testing.assert_array_equal(archive["output"], expected.output)
    np.testing.assert_array_equal(archive["indices"], expected.indices)
    assert post(live, "maxpool2d_fwd", files).content == answer.content  # no date in it


def test_an_npz_is_read_as_a_stream(live: LiveServer) -> None:
    """Java's ZipInputStream refuses stored files whose size and checksum follow their data."""
    body = json.dumps(OPERATIONS["maxpool2d_fwd"].example).encode()
    answer = live.post(body, path="/maxpool2d_fwd", headers={"accept": NPZ}).content
    read = []
    while answer.startswith(b"PK\3\4"):
        flags, _, _, _, checksum = struct.unpack("<HHHHI", answer[6:18])
        name_bytes, extra_bytes = struct.unpack("<HH", answer[26:30])
        start = 30 + name_bytes + extra_bytes
        (size,) = struct.unpack("<Q", answer[30 + name_bytes + 4 :][:8])
        assert flags == 0
        assert zlib.crc32(answer[start : start + size]) == checksum
        read.append(answer[30 : 30 + name_bytes])
        answer = answer[start + size :]
    assert read == [b"output.npy", b"indices.npy"]


def test_a_form_may_be_answered_in_json_and_json_in_npz(live: LiveServer) -> None:
    files = {"weight": npy(WEIGHT), "grad_output": npy(GRAD_OUTPUT), "response": b"values"}
    answer = post(live, "conv_bwd_data", files, Accept="application/json")
    body = {
        "weight": {"values": WEIGHT.tolist(), "dtype": "float32"},
        "grad_output": {"values": GRAD_OUTPUT.tolist(), "dtype": "float32"},
    }
    headers = {"Accept": NPZ}
    back = httpx.post(f"{live.url}/conv_bwd_data", json=body, headers=headers, timeout=60)
    values = answer.json()["grad_input"]["values"]
    np.testing.assert_array_equal(load(back.content)["grad_input"], np.float32(values))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_takes_its_example_as_a_form(live: LiveServer, operation: str) -> None:
    fields = dict(OPERATIONS[operation].example)
    answer = httpx.post(f"{live.url}/{operation}", json=fields, timeout=60).json()
    files: dict[str, Any] = {
        name: npy(decode_tensor(value, name=name))
        if name in OPERATIONS[operation].tensors
        else json.dumps(value).encode()
        for name, value in fields.items()
    }
    left_out = dict.fromkeys(OPERATIONS[operation].request.model_fields, b"")
    archive = load(post(live, operation, {**left_out, **files}).content)
    assert set(archive.files) == answer.keys() - {"report"}
    for name in archive.files:
        expected = decode_tensor(answer[name], name=name)
        np.testing.assert_array_equal(archive[name], expected, strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype(live: LiveServer, client: Client, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = {"weight": WEIGHT.astype(kind), "grad_output": GRAD_OUTPUT.astype(kind)}
    beside = f"{NPY}; dtype={dtype}"
    files = {name: (name, npy(array), beside) for name, array in arrays.items()}
    answer = post(live, "conv_bwd_data", files, Accept=NPY)
    assert answer.headers["content-type"] == (beside if dtype == "bfloat16" else NPY)
    expected = client.conv_bwd_data(**arrays)
    np.testing.assert_array_equal(load(answer.content).view(kind), expected)


def test_curl_says_bfloat16(live: LiveServer, client: Client, tmp_path: Path) -> None:
    arrays = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in (("weight", WEIGHT), ("grad_output", GRAD_OUTPUT))
    }
    files = []
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
        files += ["-F", f"{name}=@{tmp_path}/{name}.npy;type={NPY}; dtype=bfloat16"]
    answer = curl(live, "conv_bwd_data", *files, "-H", f"Accept: {NPY}")
    expected = client.conv_bwd_data(**arrays)
    np.testing.assert_array_equal(load(answer).view(ml_dtypes.bfloat16), expected)


def test_fortran_order_and_large_files(live: LiveServer, client: Client) -> None:
    large = RNG.standard_normal((2, 4, 192, 192)).astype(np.float32)
    files = {"weight": npy(np.asfortranarray(WEIGHT)), "grad_output": npy(large)}
    answer = post(live, "conv_bwd_data", files, Accept=NPY)
    np.testing.assert_array_equal(load(answer.content), client.conv_bwd_data(large, WEIGHT))
    live.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "files", "accept", "status", "said"),
    [
        ("conv_bwd_data", {"weight": npy(WEIGHT)}, NPY, 400, 'missing field "grad_output"'),
        ("conv_bwd_data", {"wieght": b""}, NPY, 400, 'did you mean "weight"?'),
        ("conv_bwd_data", {"weight": b"[[1]]"}, NPY, 400, "weight: not a .npy file"),
        ("conv_bwd_data", {"weight": npy(WEIGHT)[:-1]}, NPY, 400, "weight: shape"),
        ("conv_bwd_data", {"stride": b"1" * 20_000}, NPY, 400, "stride: expected a parameter of"),
        (
            "conv_bwd_data",
            {"weight": npy(WEIGHT), "grad_output": npy(GRAD_OUTPUT), "stride": b"[1"},
            NPY,
            400,
            'stride: expected an int or a list of ints, got "[1"',
        ),
        (
            "maxpool2d_fwd",
            {"input": npy(GRAD_OUTPUT), "kernel_size": b"2", "return_indices": b"true"},
            NPY,
            406,
            "holds one tensor, and the answer has output, indices",
        ),
        (
            "maxpool2d_fwd",
            {"input": npy(GRAD_OUTPUT), "kernel_size": b"2", "store": b'{"output": "o"}'},
            NPZ,
            406,
            "cannot name the outputs",
        ),
        (
            "conv_bwd_data",
            {"weight": (None, npy(WEIGHT), f"{NPY}; dtype=bf16")},
            NPY,
            400,
            "weight: expected dtype to be one of float16",
        ),
        ("conv_bwd_data", {"weight": b"x" * 2_100_000}, NPY, 413, "this server accepts at most"),
    ],
)
def test_refusals(
    live: LiveServer, path: str, files: dict[str, Any], accept: str, status: int, said: str
) -> None:
    answer = post(live, path, files, Accept=accept)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["detail"]
    live.wait_until_idle()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_a_stored_tensor_goes_in_and_out_as_npy(live: LiveServer, dtype: str, order: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array = np.asarray(np.arange(6000).reshape(2, 30, 100).astype(kind), order=order)  # type: ignore[call-overload]
    url = f"{live.url}/tensors/x"
    headers = {"Content-Type": f"{NPY}; dtype={dtype}" if dtype == "bfloat16" else NPY}
    told = httpx.put(url, content=npy(array), headers=headers).raise_for_status()
    assert told.json() == {"name": "x", "dtype": dtype, "shape": [2, 30, 100]}
    back = httpx.get(url, headers={"Accept": NPY}).raise_for_status()
    assert back.headers["content-type"] == headers["Content-Type"]
    np.testing.assert_array_equal(load(back.content).view(kind), array)


def test_curl_puts_a_file(live: LiveServer, client: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", WEIGHT)
    np.save(tmp_path / "g.npy", GRAD_OUTPUT)
    curl(live, "tensors/w", "-T", f"{tmp_path}/w.npy", "-H", f"Content-Type: {NPY}")
    stored = ["-F", 'stored={"weight": "w"}', "-F", f"grad_output=@{tmp_path}/g.npy"]
    answer = curl(live, "conv_bwd_data", *stored, "-H", f"Accept: {NPY}")
    np.testing.assert_array_equal(load(answer), client.conv_bwd_data(GRAD_OUTPUT, WEIGHT))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (npy(WEIGHT)[:-4], "the header describes 288 bytes of data, but 284 follow"),
        (npy(WEIGHT) + b"x", "or more follow"),
        (npy(WEIGHT)[:40], "ends inside its header"),
        (npy(WEIGHT)[:5], "not a .npy file"),
        (npy(np.array([{}])), "pickled objects"),
        (npy(np.zeros((0, 4), "f")), "is empty"),
        (npy(WEIGHT.astype(ml_dtypes.bfloat16)), "2-byte items of no type"),
    ],
)
def test_what_is_no_npy_is_not_stored(live: LiveServer, body: bytes, said: str) -> None:
    answer = httpx.put(f"{live.url}/tensors/y", content=body, headers={"Content-Type": NPY})
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert httpx.get(f"{live.url}/tensors/y").status_code == 404


@pytest.mark.parametrize("form", ["npy", "data", "values"])
def test_a_json_answer_has_the_form_of_its_request(live: LiveServer, form: str) -> None:
    weight, grad_output = (encode_tensor(array, form) for array in (WEIGHT, GRAD_OUTPUT))  # type: ignore[arg-type]
    body = {"weight": weight, "grad_output": grad_output}
    answer = httpx.post(f"{live.url}/conv_bwd_data", json=body, timeout=60).json()
    assert form in answer["grad_input"]
    other = httpx.post(f"{live.url}/conv_bwd_data", json={**body, "response": "data"}).json()
    np.testing.assert_array_equal(
        decode_tensor(answer["grad_input"], name="a"), decode_tensor(other["grad_input"], name="b")
    )
