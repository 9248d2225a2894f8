"""``convgrad serve`` as its users run it: a process, its output, its end."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from convgrad_service.server.command import serve, setting_fields
from tests.support.http_server import EXAMPLE, JSON
from tests.support.raw_http import post_head
from tests.support.tls_files import TlsFiles
from tests.support.tree_server import until

FEW_FILES = 200
_, HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
COMMAND = [sys.executable, "-c", "import resource, sys; "
           f"resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_FILES}, {HARD_LIMIT})); "
           "from convgrad_service.server.command import serve; "
           "sys.exit(serve(sys.argv[1:]))"]  # fmt: skip


@pytest.fixture
def serving(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A server on a port of the system's choice, and the file that says which."""
    port_file = tmp_path / "port"
    log_format = getattr(request, "param", "text")
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--port-file", str(port_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "CONVGRAD_MAX_QUEUE": "7",
            "CONVGRAD_GRPC_PORT": "0",
            "CONVGRAD_LOG_FORMAT": log_format,
        },
    )
    try:
        until = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        yield process, port_file
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("serving", "number"),
    [("text", signal.SIGINT), ("json", signal.SIGTERM)],
    indirect=["serving"],
    ids=["text", "json"],
)
def test_it_serves_until_interrupted(
    serving: tuple[subprocess.Popen[str], Path],
    number: signal.Signals,
    request: pytest.FixtureRequest,
) -> None:
    process, port_file = serving
    port = int(port_file.read_text())
    url = f"http://127.0.0.1:{port}"
    # Left open: an idle client must not hold it up.
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/operations").json()["limits"]["queue"] == 7
        files, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert files == HARD_LIMIT or files > 1024, "two ports' connections need more"
        answer = client.post("/conv_bwd_data", content=EXAMPLE, headers={"Content-Type": JSON})
        assert answer.status_code == 200
        # The example's weight is [[1, 0], [0, -1]], its grad_output [[1, 2], [3, 4]].
        values = answer.json()["grad_input"]["values"]
        assert values == [[[[1, 2, 0], [3, 3, -2], [0, -3, -4]]]]
        process.send_signal(number)
        # It would take half a minute if it waited for the client, see shutdown_grace_s.
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    listens = f"convgrad listens on {url}\nconvgrad listens on grpc://127.0.0.1:[0-9]+\n"
    if request.node.callspec.id == "json":
        assert out == "", "every line of the log is JSON"
        records = [json.loads(line) for line in err.splitlines()]
        messages = "".join(f"{one.get('message')}\n" for one in records)
        assert re.search(listens, messages)
        assert "/conv_bwd_data" in [one.get("path") for one in records]
    else:
        assert re.fullmatch(listens, out)
        answered = r"INFO convgrad.access request_id=\w+ method=POST path=/conv_bwd_data"
        assert re.search(answered, err)
    assert "Traceback" not in err
    assert not port_file.exists()


def test_a_second_signal_ends_it_at_once_and_without_tracebacks(
    serving: tuple[subprocess.Popen[str], Path],
) -> None:
    process, port_file = serving
    port = int(port_file.read_text())
    assert process.stdout is not None
    process.stdout.readline()
    grpc_address = process.stdout.readline().strip().rpartition("/")[2]
    stalled = threading.Event()

    def never() -> Iterator[bytes]:
        stalled.wait(60)
        yield b""

    with (
        socket.create_connection(("127.0.0.1", port)) as half_sent,
        grpc.insecure_channel(grpc_address) as channel,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        half_sent.sendall(post_head(1000) + b"{")
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer").future(never())
        assert client.get("/v2/health/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/v2/health/ready").status_code == 503)
        time.sleep(0.6)  # signals at once count as one
        process.send_signal(signal.SIGTERM)
        # Half a minute if it waited for the client, see shutdown_grace_s.
        _, err = process.communicate(timeout=20)
        stalled.set()
        assert half_sent.recv(100) == b""
        assert call.exception(60) is not None
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "code=cancelled" in err


def test_a_repeated_signal_is_one(serving: tuple[subprocess.Popen[str], Path]) -> None:
    """As timeout(1) ends a program, which sends one to it and one to its process group."""
    process, port_file = serving
    head = f"POST /conv_bwd_data HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n".encode()
    length = b"Content-Length: %d\r\n\r\n" % len(EXAMPLE)
    with socket.create_connection(("127.0.0.1", int(port_file.read_text())), 30) as connection:
        connection.sendall(head + length + EXAMPLE[:9])
        time.sleep(0.3)  # so that it runs
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        connection.sendall(EXAMPLE[9:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_a_service_manager_starts_it_and_asks_for_a_reload(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0convgrad-serve-{os.getpid()}")
        manager.settimeout(60)
        port_file = tmp_path / "port"
        arguments = ["--port", "0", "--grpc-port", "0", "--port-file", str(port_file)]
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--http-workers", "2"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "NOTIFY_SOCKET": f"@convgrad-serve-{os.getpid()}"},
        )
        try:
            assert manager.recv(100) == b"READY=1"
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/conv_bwd_data"
            with httpx.Client(timeout=60, headers={"Content-Type": JSON}) as client:
                assert client.post(url, content=EXAMPLE).status_code == 200
                os.killpg(process.pid, signal.SIGHUP)
                assert client.post(url, content=EXAMPLE).status_code == 200
            os.killpg(process.pid, signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


def test_a_port_in_use_is_one_sentence(
    serving: tuple[subprocess.Popen[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    port = serving[1].read_text().strip()
    assert serve(["--port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    as_json = [*COMMAND, "--port", port, "--log-format", "json"]
    done = subprocess.run(as_json, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in json.loads(done.stderr)["message"]
    assert serve(["--port", "0", "--grpc-port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: [Errno 98]" in capsys.readouterr().err
    bad = subprocess.run(
        [*COMMAND, "--max-queue", "many"],
        capture_output=True,
        text=True,
        env={**os.environ, "CONVGRAD_LOG_FORMAT": "json"},
    )
    assert bad.returncode == 2
    assert "CONVGRAD_MAX_QUEUE" in json.loads(bad.stderr)["message"]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")
def test_a_failed_handshake_leaves_the_log_json(tmp_path: Path) -> None:
    """Nothing is logged by gRPC's library, whose lines have another format."""
    files = TlsFiles.made(tmp_path).server()
    command = [*COMMAND, "--port", "0", "--grpc-port", "0", "--log-format", "json"]
    command += [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        while "on grpcs" not in (line := process.stderr.readline()):
            assert process.poll() is None
            lines.append(line)
        port = int(re.findall(r"grpcs://127.0.0.1:([0-9]+)", line)[0])
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(100)
        process.terminate()
        lines += [line, *process.stderr]
    assert process.returncode == 0
    assert all(json.loads(one)["message"] for one in lines)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        serve(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for name, _, _ in setting_fields():
        assert f"--{name.replace('_', '-')}" in text
    for words in ("--warm-up PATH", "--kernel-cache PATH", "--key-max-requests-per-s RATE"):
        assert words in text


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--port", "70000"], "CONVGRAD_HTTP_PORT"),
        (["--max-json-bytes", "lots"], "CONVGRAD_MAX_JSON_BYTES"),
        (["--api-keys", "/no/such"], "CONVGRAD_API_KEYS"),
        (["--otlp-endpoint", "collector"], "CONVGRAD_OTLP_ENDPOINT"),
        (["--port-file", "/no/such/port"], "--port-file"),
    ],
)
def test_a_bad_setting_is_one_sentence(
    argv: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(argv) == 2
    error = capsys.readouterr().err
    assert name in error
    assert argv[1] in error
    assert "Value error" not in error
    assert "Traceback" not in error


def test_memory_that_the_system_refuses_is_one_sentence() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32)); "
    command = [sys.executable, "-c", limited + COMMAND[2], "--port", "0", "--memory-bytes", "64GiB"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"cannot map [\d,]+ bytes .*CONVGRAD_MEMORY_BYTES", done.stderr)
    assert "Traceback" not in done.stderr


def test_too_few_files_are_one_sentence() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)); "
    serve_only = limited + "import sys; " + COMMAND[2].partition("; ")[2].partition("; ")[2]
    command = [sys.executable, "-c", serve_only, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "at most 32 files may be open" in done.stderr
    assert "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has none")
def test_a_log_that_cannot_be_written_does_not_end_the_server(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with Path("/dev/full").open("w") as full:
        command = [*COMMAND, "--port", "0", "--grpc-port", "0", "--port-file", str(port_file)]
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        until(lambda: port_file.exists() or process.poll() is not None)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}/conv_bwd_data"
        for _ in range(3):
            assert (
                httpx.post(url, content=EXAMPLE, headers={"Content-Type": JSON}).status_code == 200
            )
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
