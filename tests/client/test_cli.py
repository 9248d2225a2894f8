"""The command line, in this process and as a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad.cli import _service, main
from convgrad.cli._request import parameter_value
from convgrad.contract import OPERATIONS
from convgrad.wire import safetensors
from tests.support.fake_server import FakeServer, answer, ones, problem
from tests.support.local_http import listening

RESULT = np.arange(8, dtype=np.float32).reshape(1, 1, 8)


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer([answer({"grad_input": RESULT})])


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    with listening(fake) as address:
        yield address


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with a grad_output and a weight in each kind of file."""
    np.save(tmp_path / "gy.npy", ones(1, 2, 4))
    np.savez(tmp_path / "layer.npz", w=ones(2, 1, 2), b=ones(2))
    bfloat16 = {"weight": ones(2, 1, 2, dtype=ml_dtypes.bfloat16)}
    write_safetensors(tmp_path / "layer.safetensors", bfloat16)
    return tmp_path


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    path.write_bytes(b"".join(bytes(chunk) for chunk in safetensors.encode(tensors, {})))


def bwd_data(files: Path, *more: str) -> list[str]:
    return [
        "call",
        "conv_bwd_data",
        *("--input", f"grad_output={files / 'gy.npy'}"),
        *("--input", f"weight={files / 'layer.npz'}:w"),
        *more,
    ]


def test_call_sends_files_and_parameters_and_writes_the_result(
    fake: FakeServer, url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = files / "out.npy"
    options = ["--url", url, "--stride", "2", "--padding", "[[0, 1]]", "--param", "layout=NCW"]
    more = ["--param", "groups=1", "--no-deterministic", "--output", str(out)]
    assert main(bwd_data(files, *options, *more)) == 0
    tensors, parameters = fake.sent()
    assert {name: array.shape for name, array in tensors.items()} == {
        "grad_output": (1, 2, 4),
        "weight": (2, 1, 2),
    }
    assert parameters == {
        "stride": 2,
        "padding": [[0, 1]],
        "layout": "NCW",
        "deterministic": False,
    }
    np.testing.assert_array_equal(np.load(out), RESULT)
    assert [path.name for path in files.iterdir() if "unfinished" in path.name] == []
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "grad_input: float32 [1, 1, 8]",
        "fake kernel by_hand: 1.000 ms, 0.0 GFLOP/s",
        f"written to {out}",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("2.5", 2.5),
        ("true", True),
        ("NHWC", "NHWC"),
        ("56,57", [56, 57]),
        ("56, 57", [56, 57]),
        ("[56, 57]", [56, 57]),
        ("[0,1],[2,3]", [[0, 1], [2, 3]]),
        ("a,b", "a,b"),
        ("", ""),
    ],
)
def test_a_parameter_is_json_or_a_list_without_brackets_or_text(text: str, value: Any) -> None:
    assert parameter_value(text) == value


def test_call_prints_json(url: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bwd_data(files, "--url", url, "--json", "--wire", "json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["outputs"] == {"grad_input": {"dtype": "float32", "shape": [1, 1, 8]}}
    assert told["report"]["kernel"] == "by_hand"
    assert told["request_id"] == "at-server"


def test_bfloat16_goes_through_safetensors(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "out.safetensors"
    bf16 = ones(1, 1, 5, dtype=ml_dtypes.bfloat16)
    write_safetensors(files / "gy.safetensors", {"anything": ones(1, 2, 4, dtype=bf16.dtype)})
    served = FakeServer([answer({"grad_input": bf16})])
    arguments = [
        "call",
        "conv_bwd_data",
        *("--input", f"grad_output={files / 'gy.safetensors'}"),
        *("--input", f"weight={files / 'layer.safetensors'}"),
    ]
    with listening(served) as address:
        assert main([*arguments, "--url", address, "--output", str(out)]) == 0
        tensors, _ = served.sent()
        assert {array.dtype for array in tensors.values()} == {bf16.dtype}
        written, _ = safetensors.decode(out.read_bytes())
        np.testing.assert_array_equal(written["grad_input"], bf16)
        npy = files / "out.npy"
        assert main([*arguments, "--url", address, "--output", str(npy)]) == 2
    assert not npy.exists()
    assert "cannot hold bfloat16" in capsys.readouterr().err


def test_several_outputs_need_a_file_that_holds_several(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pooled = {"output": ones(1), "indices": ones(1, dtype=np.int64)}
    arguments = ["call", "maxpool2d_fwd", "--input", f"input={files / 'x.npy'}"]
    arguments += ["--kernel-size", "2", "--return-indices"]
    np.save(files / "x.npy", ones(1, 1, 2, 2))
    with listening(FakeServer([answer(pooled)])) as address:
        arguments += ["--url", address, "--output"]
        assert main([*arguments, str(files / "out.npy")]) == 2
        assert "but the answer has " in capsys.readouterr().err
        assert main([*arguments, str(files / "out.npz")]) == 0
    with np.load(files / "out.npz") as written:
        assert set(written.files) == set(pooled)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--input", "input=x.npy"], "conv_bwd_data takes grad_output, weight, accumulate"),
        (["--input", "accumulate"], "--input: expected NAME=…, got 'accumulate'"),
        (["--input", "accumulate=absent.npy"], "cannot read absent.npy: No such file"),
        (["--input", "accumulate=x.txt"], "expected a file .npy, .npz or .safetensors"),
        (["--input", "accumulate={0}/layer.npz"], "has no 'accumulate'; it has w, b"),
        (["--input", "accumulate={0}/pickled.npy"], "cannot read"),
        (["--input", "accumulate={0}/rubbish.npy"], "it does not begin as a .npy file does"),
        (["--input", "accumulate={0}/rubbish.npz"], "cannot read"),
        (["--input", "accumulate={0}/rubbish.safetensors"], "cannot read"),
        (["--input", "accumulate={0}/voids.npy"], "store bfloat16 as .safetensors"),
        (["--input", "weight={0}/layer.npz:w"], "weight is given twice"),
        (["--param", "stride=1", "--stride", "2"], "stride is given twice"),
        (["--param", "strid=2"], 'did you mean "stride"'),
        (["--stride", "wide"], "stride: expected"),
        (["--output", "out.txt"], "--output: expected a file"),
        (["--output", "nowhere/out.npy"], "there is no directory 'nowhere'"),
        (["--url", "server:1"], "base_url: expected http://"),
        (["--max-retries", "-1"], "max_retries: expected a whole number, 0 or more"),
        (["--header", "key"], "--header: expected 'NAME: VALUE'"),
        (["--str", "2"], "unrecognized arguments: --str"),
    ],
)
def test_a_wrong_command_line_is_status_2(
    more: list[str], sentence: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(files / "pickled.npy", np.array([{}]))
    np.save(files / "voids.npy", np.zeros(2, "V2"))
    for name in ("rubbish.npy", "rubbish.npz", "rubbish.safetensors"):
        (files / name).write_bytes(b"PK rubbish")
    unreachable = ["--url", "http://127.0.0.1:9"]
    arguments = bwd_data(files, *unreachable, *(text.format(files) for text in more))
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert "Traceback" not in told.err


def test_a_missing_tensor_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", "conv_fwd"]) == 2
    assert 'missing field "input"' in capsys.readouterr().err


def test_what_the_server_refuses_is_status_1(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(FakeServer([problem("invalid-problem", "weight: too wide")])) as address:
        assert main(bwd_data(files, "--url", address)) == 1
    assert capsys.readouterr().err == "convgrad: weight: too wide (request at-server)\n"


def test_a_server_that_is_not_there_is_status_1(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(bwd_data(files, "--url", "http://127.0.0.1:9", "--max-retries", "0")) == 1
    told = capsys.readouterr().err
    assert told.startswith(
        "convgrad: no answer from http://127.0.0.1:9/conv_bwd_data: ConnectionRefusedError"
    )
    assert told.count("\n") == 1


def test_an_answer_cut_off_on_the_wire_is_a_failed_connection(fake: FakeServer) -> None:
    with (
        listening(fake, cut_bytes=3) as address,
        convgrad.Client(address, max_retries=1, sleep=lambda seconds: None) as client,
        pytest.raises(convgrad.ConnectionFailed, match="broke off after"),
    ):
        client.conv_bwd_data(ones(1, 1, 4), ones(1, 1, 1))
    assert len(fake.requests) == 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", name, "--help"]) == 0
    text = capsys.readouterr().out
    fields = set(OPERATIONS[name].request.model_fields) - {
        "response",
        "stored",
        "store",
        *OPERATIONS[name].tensors,
    }
    for field in fields:
        assert f"-{field.replace('_', '-')}" in text
    assert "--response" not in text


@pytest.mark.parametrize("arguments", [["--help"], ["operations", "--help"], ["call", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "usage: convgrad" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["sing"], ["call"], ["call", "sing"]])
def test_no_command_or_a_wrong_one_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert "usage: convgrad" in told.out + told.err


def test_operations_offline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operations", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["operation", *OPERATIONS]
    assert "grad_output, weight, [accumulate]" in lines[1]
    assert main(["operations", "--offline", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(OPERATIONS)


def test_serve_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "tests.client.test_cli:take_arguments")
    assert main(["serve", "--port", "1"]) == 7
    assert TAKEN == ["--port", "1"]


TAKEN: list[str] = []


def take_arguments(argv: list[str]) -> int:
    TAKEN[:] = argv
    return 7


@pytest.mark.parametrize("entry", [None, "tests.absent:serve", "tests.client.test_cli:needs_more"])
def test_serve_says_what_to_install(
    entry: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, entry)
    assert main(["serve"]) == 2
    assert "pip install 'convgrad[service]'" in capsys.readouterr().err


def needs_more(argv: list[str]) -> int:
    raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")


def install(monkeypatch: pytest.MonkeyPatch, entry: str | None) -> None:
    """Pretend that this, or nothing, is the installed service."""
    found = [EntryPoint("serve", entry, "convgrad.commands")] if entry else []
    monkeypatch.setattr(_service, "entry_points", lambda **selection: EntryPoints(found))


def test_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main_without_sklearn(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    demo = ModuleType("convgrad.demo")
    monkeypatch.setattr(demo, "main", main_without_sklearn, raising=False)
    monkeypatch.setitem(sys.modules, "convgrad.demo", demo)
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert "demo needs sklearn" in told
    assert "pip install 'convgrad[demo]'" in told


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "convgrad", *arguments], capture_output=True, text=True, timeout=120
    )


def test_as_a_process(url: str, files: Path) -> None:
    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"convgrad {convgrad.__version__}\n")
    called = run(*bwd_data(files, "--url", url, "--output", str(files / "out.npz")))
    assert (called.returncode, called.stderr) == (0, "")
    refused = run(*bwd_data(files, "--stride", "x"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("convgrad: stride: expected")
    assert refused.stderr.count("\n") == 1


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "convgrad", "operations", "--offline", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("closed", ["<&- >&-", ">&-", "<&- >&- 2>&-"])
def test_closed_standard_files_are_the_null_device(closed: str, tmp_path: Path) -> None:
    """A server may start without them; their numbers must not be its sockets'."""
    code = (
        "import os, pathlib, sys; from convgrad.cli import main; status = main(['--version']);"
        "pathlib.Path(sys.argv[1]).write_text(f'{status} {os.open(os.devnull, os.O_RDONLY) > 2}')"
    )
    said = tmp_path / "said"
    command = f'exec "$@" {closed}'
    process = subprocess.run(["sh", "-c", command, "sh", sys.executable, "-c", code, str(said)])
    assert process.returncode == 0
    assert said.read_text() == "0 True"


def test_health(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["health", "--url", url]) == 0
    assert main(["health", "--live", "--url", url + "/"]) == 0
    monkeypatch.setenv("CONVGRAD_URL", url)
    assert main(["health"]) == 0
    assert capsys.readouterr().out == "ready\nlive\nready\n"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        assert main(["health", "--url", f"http://127.0.0.1:{port}", "--timeout", "2"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"not ready: no answer from http://127.0.0.1:{port}/v2/health/ready: ")
    assert "is a server running there? `convgrad serve` starts one" in said


def test_a_proxy_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", f"http://user:secret@{proxy}")
        monkeypatch.setenv("no_proxy", "")
        assert main(["health", "--url", "http://lab.example", "--timeout", "2"]) == 1
    said = capsys.readouterr().out
    assert f"the environment sets the proxy {proxy}; to bypass it" in said
    assert "secret" not in said
