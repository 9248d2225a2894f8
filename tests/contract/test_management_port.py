"""The management port: health and metrics in plain HTTP, whatever the other ports want."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.security.keys import hash_of, new_key
from convgrad_service.server.http_server import listening_socket
from convgrad_service.server.probe_command import probe
from tests.support.fake_backends import GatedByFile
from tests.support.http_server import EXAMPLE, JSON
from tests.support.tls_files import TlsFiles
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


def cpu(device: int) -> CpuBackend:
    return CpuBackend(threads=1)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[TreeServer]:
    """A server of which callers need a certificate and a key."""
    files = TlsFiles.made(tmp_path)
    (tmp_path / "keys").write_text(f"ada:{hash_of(new_key())}")
    with serving_tree(
        cpu,
        management_port=0,
        tls_client_ca=files.authority,
        api_keys=tmp_path / "keys",
        **files.server(),
    ) as server:
        yield server


def url_of(server: TreeServer) -> str:
    assert server.tree.management_port is not None
    return f"http://127.0.0.1:{server.tree.management_port}"


def test_the_platform_needs_neither_certificate_nor_key(
    guarded: TreeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(guarded)
    assert httpx.get(f"{url}/v2/health/live").json() == {"live": True}
    assert httpx.get(f"{url}/v2/health/ready").json() == {"ready": True}
    assert "convgrad_workers 1.0" in httpx.get(f"{url}/metrics").text
    # It is for nothing else.
    for path in ("/operations", "/v2", "/docs", "/openapi.json", "/tensors"):
        assert httpx.get(f"{url}{path}").status_code == 404, path
    elsewhere = httpx.post(f"{url}/conv_fwd", json={})
    assert elsewhere.status_code == 404
    assert elsewhere.json()["detail"].endswith("; this port serves health and metrics only")
    monkeypatch.setenv("CONVGRAD_MANAGEMENT_PORT", url.rpartition(":")[2])
    monkeypatch.setenv("CONVGRAD_TLS_CLIENT_CA", "not looked at")
    assert probe([]) == probe(["--live"]) == 0


def test_it_answers_for_as_long_as_the_server_drains(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def watch() -> None:
        while True:
            try:
                ready = httpx.get(f"{url}/v2/health/ready", timeout=10)
                live = httpx.get(f"{url}/v2/health/live", timeout=10)
            except httpx.TransportError:
                return
            seen.append((ready.status_code, live.status_code))

    watching = threading.Thread(target=watch)
    gate = tmp_path / "open"
    with serving_tree(partial(GatedByFile, gate), management_port=0, drain_s=0.2) as server:
        url = url_of(server)
        watching.start()
        until(lambda: (200, 200) in seen)
        asking = threading.Thread(
            target=httpx.post,
            args=(f"{server.url}/conv_bwd_data",),
            kwargs={"content": EXAMPLE, "headers": {"Content-Type": JSON}, "timeout": 60},
        )
        asking.start()
        until(lambda: server.tree.hub.scheduler.running == 1)
        # After drain_s the other ports take nothing more, and what runs is finished.
        threading.Timer(1.0, gate.touch).start()
    watching.join()
    asking.join()
    assert set(seen) == {(200, 200), (503, 200)}
    assert seen == sorted(seen), "once it is not ready, it stays so"
    assert seen.count((503, 200)) >= 2


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with listening_socket("127.0.0.1", 0) as bound:
        bound.listen()
        taken = bound.getsockname()[1]
        sentence = f"cannot listen on 127.0.0.1:{taken} for management"
        with (
            pytest.raises(AssertionError, match=sentence),
            serving_tree(cpu, management_port=taken),
        ):
            pass
