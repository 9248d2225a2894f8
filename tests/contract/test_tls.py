"""TLS on both ports: every client of the plain ones over it, certificates checked both ways."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client

import convgrad
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.server import tls
from convgrad_service.server.probe_command import probe
from convgrad_service.server.settings import Settings
from tests.support.fake_backends import Zeros
from tests.support.killable import mortal
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tls_files import TlsFiles
from tests.support.tree_server import serving_tree

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles.made(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def server(files: TlsFiles) -> Iterator[OipServer]:
    with serving_oip(CpuBackend(), **files.server()) as running:
        yield running


def pooled(server: OipServer, array: np.ndarray[Any, Any], **security: Any) -> Any:
    tensor = grpc_client.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
    with grpc_client.InferenceServerClient(server.grpc, ssl=True, **security) as client:
        result = client.infer(
            "maxpool2d_fwd", [tensor], parameters={"kernel_size": 2}, client_timeout=20
        )
        return result.as_numpy("output")


@pytest.mark.parametrize("size", [4, 64, 2048])
def test_tensors_over_both_ports(server: OipServer, files: TlsFiles, seed: int, size: int) -> None:
    array = np.random.default_rng(seed).standard_normal((1, 2, size, size), dtype=np.float32)
    wanted = array.reshape(1, 2, size // 2, 2, size // 2, 2).max((3, 5))
    roots = {"root_certificates": str(files.authority)}
    np.testing.assert_array_equal(pooled(server, array, **roots), wanted)
    with (
        httpx.Client(verify=files.client_context(), timeout=20) as http,
        convgrad.Client(f"https://{server.http}", http_client=http) as client,
    ):
        np.testing.assert_array_equal(client.maxpool2d_fwd(array, 2).output, wanted)


def test_connections_that_are_dealt_out_are_secure_too(files: TlsFiles) -> None:
    with (
        serving_tree(mortal, http_workers=2, **files.server()) as server,
        httpx.Client(verify=files.client_context(), timeout=20) as http,
    ):
        secure = server.url.replace("http:", "https:")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/v2", timeout=60)
        for _ in range(4):
            with convgrad.Client(secure, http_client=http, max_retries=0) as client:
                ones = np.ones((1, 1, 1, 1), np.float32)
                assert client.conv_bwd_data(ones, ones).item() == 2


def test_clients_know_whom_they_talk_to(server: OipServer) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://{server.http}/v2", timeout=60)
    with pytest.raises(Exception, match=r"UNAVAILABLE|Deadline"):
        pooled(server, np.zeros((1, 1, 2, 2), np.float32))


def test_plain_text_is_no_way_in(server: OipServer) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{server.http}/v2", timeout=60)
    with pytest.raises(Exception, match=r"UNAVAILABLE|Deadline"):
        grpc_client.InferenceServerClient(server.grpc).is_server_live(client_timeout=5)


def test_clients_are_asked_for_certificates(files: TlsFiles) -> None:
    with serving_oip(Zeros(), **files.server(), tls_client_ca=files.authority) as server:
        url = f"https://{server.http}/v2/health/live"
        assert httpx.get(url, verify=files.client_context("client"), timeout=60).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=files.client_context(), timeout=60)
        array = np.zeros((1, 1, 2, 2), np.float32)
        security = {
            "root_certificates": str(files.authority),
            "private_key": str(files.key("client")),
            "certificate_chain": str(files.certificate("client")),
        }
        assert pooled(server, array, **security).shape == (1, 1, 1, 1)
        with pytest.raises(Exception, match=r"UNAVAILABLE|Deadline"):
            pooled(server, array, root_certificates=str(files.authority))


def shown_certificate(server: OipServer, files: TlsFiles) -> bytes:
    host, port = server.grpc.split(":")
    with (
        socket.create_connection((host, int(port)), 5) as plain,
        files.client_context().wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        certificate = secure.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


def test_renewed_certificates_are_served(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_CHECK_S", 0.0)
    renewed = TlsFiles(files.folder)
    with serving_oip(Zeros(), **renewed.server()) as server:
        first = shown_certificate(server, files)
        assert shown_certificate(server, files) == first
        # Half written: the old one goes on being served.
        whole = renewed.certificate("server").read_bytes()
        renewed.certificate("server").write_bytes(whole[: len(whole) // 2])
        assert shown_certificate(server, files) == first
        assert "remains in use" not in caplog.text
        for _ in range(3):
            assert shown_certificate(server, files) == first
        (warning,) = (one for one in caplog.messages if "certificate remains in use" in one)
        assert str(renewed.certificate("server")) in warning
        renewed.sign("server")
        assert shown_certificate(server, files) != first


def test_grpcio_gets_a_configuration_only_when_files_change(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes it replace what pending handshakes use, which hundreds of them do not survive."""
    monkeypatch.setattr(tls, "_CHECK_S", 0.0)
    fetchers: list[Callable[[], object]] = []
    made = grpc.dynamic_ssl_server_credentials

    def watched(first: object, fetch: Callable[[], object], **options: bool) -> object:
        fetchers.append(fetch)
        return made(first, fetch, **options)

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", watched)
    renewed = TlsFiles(files.folder)
    with serving_oip(Zeros(), **renewed.server()):
        (fetch,) = fetchers
        assert fetch() is None
        renewed.sign("server")
        assert fetch() is not None
        assert fetch() is None


def test_alpn_names_what_is_spoken(server: OipServer, files: TlsFiles) -> None:
    for address, protocol in ((server.grpc, "h2"), (server.http, "http/1.1")):
        host, port = address.split(":")
        context = files.client_context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection((host, int(port)), 5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            assert secure.selected_alpn_protocol() == protocol
            assert secure.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.parametrize(
    "names",
    [("server.pem", None, None), (None, "server.key", None), (None, None, "ca.pem"),
     ("missing.pem", "server.key", None), ("server.pem", "client.key", None),
     ("server.pem", "server.key", "server.key")],
)  # fmt: skip
def test_settings_that_cannot_be(files: TlsFiles, names: tuple[str | None, ...]) -> None:
    paths = [None if name is None else files.folder / name for name in names]
    certificate, key, authority = paths
    settings = Settings(tls_certificate=certificate, tls_key=key, tls_client_ca=authority)
    with pytest.raises(tls.TlsError, match=r"must be set together|cannot serve TLS with"):
        tls.server_context(settings, "h2")


def test_without_settings_there_is_no_tls() -> None:
    assert tls.server_context(Settings(), "h2") is None


def test_the_command_says_what_is_wrong(files: TlsFiles) -> None:
    code = "from convgrad_service.server.command import serve; raise SystemExit(serve())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--tls-certificate", str(files.certificate("server"))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "tls_certificate and tls_key must be set together" in done.stderr


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets settings as a container's environment does."""

    def set_to(address: str, **settings: object) -> None:
        monkeypatch.setenv("CONVGRAD_HTTP_HOST", "0.0.0.0")  # noqa: S104 - as images have it
        monkeypatch.setenv("CONVGRAD_HTTP_PORT", address.rpartition(":")[2])
        for name, value in settings.items():
            monkeypatch.setenv(f"CONVGRAD_{name.upper()}", str(value))

    return set_to


def test_a_probe_speaks_as_the_server_does(
    files: TlsFiles, environment: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_oip(Zeros(), **files.server()) as server:
        environment(server.http)
        assert probe([]) == 1  # plain HTTP is not answered
        environment(server.http, **files.server())
        assert probe([]) == probe(["--live"]) == 0
        assert capsys.readouterr().out.splitlines()[-2:] == ["ready", "live"]
        # Somebody else's certificate is not trusted.
        files.sign("other")
        environment(server.http, tls_certificate=files.certificate("other"))
        assert probe([]) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().out


def test_a_probe_has_no_certificate_to_show(
    files: TlsFiles, environment: Callable[..., None]
) -> None:
    mutual = {**files.server(), "tls_client_ca": files.authority}
    with serving_oip(Zeros(), **mutual) as server:
        environment(server.http, **mutual)
        assert probe([]) == 0
    assert probe([]) == 1  # nothing listens there any more


def test_a_probe_says_why_not(
    environment: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving_oip(Zeros()) as server:
        # The server has read its keys; what is in the file now is not the probe's business.
        environment(server.http, api_keys=tmp_path / "gone")
        assert probe([]) == 0
        server.pipeline.draining = True
        assert probe([]) == 1
        assert "not ready: the server is shutting down" in capsys.readouterr().out
        assert probe(["--live"]) == 0
    environment(server.http, http_port="many")
    assert probe([]) == 2
    assert "http_port" in capsys.readouterr().err
