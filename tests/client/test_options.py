"""Options: where defaults come from, what is refused, what events tell, which timeouts hold."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Any

import httpx
import pytest

import convgrad
from convgrad import ConnectionFailed
from convgrad.errors import ClientError, GatewayError
from tests.support.fake_server import FakeServer, answer, ones, problem
from tests.support.local_http import listening

GOOD = answer({"output": ones(1, 1, 1)})


def ask(client: convgrad.Client) -> Any:
    return client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))


def test_the_environment_names_the_server_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer([GOOD])
    monkeypatch.setenv("CONVGRAD_API_KEY", "from-environment")
    with listening(fake) as url:
        monkeypatch.setenv("CONVGRAD_URL", url)
        with convgrad.Client() as client:
            ask(client)
        with convgrad.Client(api_key="given") as client:
            ask(client)
        with convgrad.Client(headers={"Authorization": "Basic x"}) as client:
            ask(client)
            ask(client.with_options(api_key="other"))
    sent = [request.headers["Authorization"] for request in fake.requests]
    assert sent == ["Bearer from-environment", "Bearer given", "Basic x", "Bearer other"]
    monkeypatch.delenv("CONVGRAD_URL")
    assert repr(convgrad.Client()) == "Client('http://127.0.0.1:8000')"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("CONVGRAD_API_KY", "CONVGRAD_API_KEY"), ("CONVGRAD_URI", "CONVGRAD_URL")],
)
def test_a_misspelt_variable_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    for name in ("CONVGRAD_URL", "CONVGRAD_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://elsewhere")
    with pytest.warns(
        RuntimeWarning, match=f"{variable} is not read; did you mean {meant}"
    ) as all_:
        convgrad.Client().close()
    assert [warning.filename for warning in all_] == [__file__]
    monkeypatch.setenv(meant, "http://meant")
    convgrad.Client().close()  # no warning, which would be an error


def test_the_servers_settings_are_nobody_elses_business(monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad_service.server.command import setting_fields

    for name, _, _ in setting_fields():
        monkeypatch.setenv(f"CONVGRAD_{name.upper()}", "1")
    convgrad.Client().close()


def test_options_that_do_not_exist_are_refused() -> None:
    with convgrad.Client() as client:
        for wrong in ({"retry": 3}, {"retries": 3}, {"base_url": "http://elsewhere"}):
            with pytest.raises(TypeError, match=r"with_options has no '.*'; it takes timeout, "):
                client.with_options(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="retry"):
        convgrad.AsyncClient().with_options(retry=3)  # type: ignore[call-arg]


def test_options_may_be_given_as_none() -> None:
    """As the constructor allows, so that a program can pass its own optional arguments on."""
    server = FakeServer([GOOD])
    with server.client(headers={"X-One": "1"}) as client:
        nothing: Any = dict.fromkeys(("headers", "api_key", "event_hooks", "store", "read_timeout"))
        ask(client.with_options(**nothing))
        with pytest.raises(ValueError, match=r"store: expected names by output.*got \['output'\]"):
            client.with_options(store=["output"])  # type: ignore[arg-type]
    assert server.requests[0].headers["X-One"] == "1"


def test_headers_of_with_options_are_added() -> None:
    server = FakeServer([GOOD])
    with server.client(headers={"X-One": "1", "X-Two": "2"}) as client:
        ask(client.with_options(headers={"x-two": "two", "X-Three": "3"}))
    found = server.requests[0].headers
    assert [found["X-One"], found["X-Two"], found["X-Three"]] == ["1", "two", "3"]
    assert len(found.get_list("x-two")) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_answers_of_a_gateway_are_tried_again(status: int) -> None:
    busy = httpx.Response(status, text="<h1>busy</h1>", headers={"Retry-After": "2"})
    server = FakeServer([busy, busy, GOOD])
    with server.client() as client:
        ask(client)
    assert len(server.requests) == 3
    assert all(2 <= slept_s <= 2.5 for slept_s in server.slept_s)
    server = FakeServer([busy])
    with (
        server.client(max_retries=1) as client,
        pytest.raises(GatewayError, match=f"status {status} with '<h1>busy") as caught,
    ):
        ask(client)
    assert (caught.value.status, caught.value.retry_after_s) == (status, 2)
    assert len(server.requests) == 2


def test_a_gateway_may_answer_with_problem_details_of_its_own() -> None:
    body = b'{"code": "upstream_reset", "detail": "no healthy upstream"}'
    busy = httpx.Response(503, content=body, headers={"Content-Type": "application/problem+json"})
    server = FakeServer([busy, GOOD])
    with server.client() as client:
        ask(client)
    assert len(server.requests) == 2


def test_a_gateway_is_asked_again_asynchronously() -> None:
    async def run() -> None:
        server = FakeServer([httpx.Response(503), GOOD])
        async with server.async_client() as client:
            await client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))
        assert len(server.requests) == 2

    asyncio.run(run())


def test_event_hooks_see_each_attempt(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    hooks: Any = {name: [seen.append] for name in ("request", "response", "retry")}
    server = FakeServer([problem("overloaded"), httpx.ConnectError("refused"), GOOD])
    with (
        caplog.at_level(logging.DEBUG, "convgrad"),
        server.client(event_hooks=hooks) as client,
    ):
        ask(client)
    kinds = [type(event).__name__.removesuffix("Event") for event in seen]
    assert kinds == [
        *("Request", "Response", "Retry"),
        *("Request", "Retry"),
        *("Request", "Response"),
    ]
    assert [event.attempt for event in seen] == [1, 1, 1, 2, 2, 3, 3]
    assert isinstance(seen[2].error, convgrad.Overloaded)
    assert seen[2].delay_s == server.slept_s[0]
    assert (seen[1].status, seen[-1].status) == (429, 200)
    assert seen[-1].body_bytes == len(GOOD.content)
    assert seen[0].body_bytes == len(server.requests[0].content)
    lines = [record for record in caplog.records if record.name == "convgrad"]
    assert [line.getMessage() for line in lines] == [str(event) for event in seen]
    assert [line.levelname for line in lines].count("INFO") == 2


@pytest.mark.parametrize(
    ("hooks", "sentence"),
    [
        ({"answer": [print]}, "expected request, response, retry, failure, progress, got 'answer'"),
        ({"request": [1]}, "a list of functions for 'request'"),
        ({"request": print}, "a list of functions for 'request'"),
    ],
)
def test_hooks_that_cannot_work_are_refused(hooks: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        convgrad.Client(event_hooks=hooks)


@pytest.mark.parametrize("http", ["own", "httpx"])
def test_a_silent_server_is_a_lost_connection_after_the_read_timeout(http: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        injected = httpx.Client() if http == "httpx" else None
        started = time.monotonic()
        with (
            convgrad.Client(
                url, read_timeout=0.1, max_retries=1, http_client=injected, sleep=lambda s: None
            ) as client,
            pytest.raises(ConnectionFailed, match=r"read_timeout of 0\.1 s"),
        ):
            ask(client)
        assert 0.2 <= time.monotonic() - started < 30
        if injected is not None:
            injected.close()


def test_a_read_timeout_bounds_silence_and_not_a_slow_answer() -> None:
    content = GOOD.content
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\n"

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content))
            for start in range(0, len(content), 40):
                time.sleep(0.1)
                connection.sendall(content[start : start + 40])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with convgrad.Client(url, read_timeout=5, max_retries=0) as client:
            assert ask(client).shape == (1, 1, 1)
        thread.join()


def test_connecting_has_a_timeout_of_its_own() -> None:
    asked: list[float] = []

    def create_connection(address: Any, timeout: float) -> Any:
        asked.append(timeout)
        raise TimeoutError("timed out")

    with (
        pytest.MonkeyPatch.context() as patched,
        convgrad.Client("http://server", connect_timeout=3, max_retries=0) as client,
    ):
        patched.setattr(socket, "create_connection", create_connection)
        with pytest.raises(ConnectionFailed, match="timed out"):
            ask(client)
        with pytest.raises(ConnectionFailed, match="timed out"):
            ask(client.with_options(timeout=2))
    assert asked[0] == 3
    assert asked[1] <= 2


def test_a_closed_client_says_so() -> None:
    fake = FakeServer([GOOD])
    with listening(fake) as url:
        for closed in (convgrad.Client(url), convgrad.Client(url, http_client=httpx.Client())):
            closed.close()
            if closed._transport.closed:
                with pytest.raises(ClientError, match="this client is closed"):
                    ask(closed.with_options(timeout=1))
            else:  # an injected client is its owner's to close
                ask(closed)
                closed._transport._http.close()  # type: ignore[attr-defined]
                with pytest.raises(ClientError, match="this client is closed"):
                    ask(closed)

        async def run() -> None:
            client = convgrad.AsyncClient(url)
            await client.close()
            for use in (client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1)), client.is_ready()):
                with pytest.raises(ClientError, match="this client is closed"):
                    await use

        asyncio.run(run())
        with pytest.raises(ClientError, match="this client is closed"):
            closed.is_live()  # rather than False, which would be said of the server


def test_messages_lead_somewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    for http in (None, httpx.Client()):
        with (
            convgrad.Client(f"http://127.0.0.1:{free}", max_retries=0, http_client=http) as client,
            pytest.raises(ConnectionFailed, match=r"is a server running there\? `convgrad serve`"),
        ):
            ask(client)
        if http is not None:
            http.close()
    with convgrad.Client() as client:
        for name in ("a/b", "", ".hidden", "x" * 129, 3):
            with pytest.raises(convgrad.MalformedRequest, match="cannot be called"):
                client.put(name, ones(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"convgrad\.calls\.conv_bwd_data\("):
            client.call("conv_bwd_data")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got <function"):
            next(client.iterate(convgrad.calls.conv_fwd))  # type: ignore[arg-type]


def test_https_to_a_server_without_tls_is_recognised() -> None:
    with (
        listening(FakeServer([GOOD])) as url,
        convgrad.Client(url.replace("http:", "https:"), max_retries=0) as client,
        pytest.raises(ConnectionFailed, match="it may be http://, not https://"),
    ):
        ask(client)


@pytest.mark.parametrize("http", ["own", "httpx"])
def test_the_grpc_port_is_recognised(http: str) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # an empty SETTINGS frame of HTTP/2

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        injected = httpx.Client() if http == "httpx" else None
        with (
            convgrad.Client(url, max_retries=0, http_client=injected) as client,
            pytest.raises(ConnectionFailed, match="may be the server's gRPC port"),
        ):
            ask(client)
        thread.join()
        if injected is not None:
            injected.close()
