"""Two replicas behind nginx: what they share, what they do not, and draining one of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import setitem
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

import convgrad
from convgrad_service.security.keys import hash_of, new_key
from tests.load.served import Served, server
from tests.support.tcp_service import tcp_service
from tests.support.tree_server import alive, until

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(
        shutil.which("nginx") is None, reason="needs nginx, from Debian's package nginx"
    ),
]

CONFIGURATION = """
daemon off; error_log stderr; pid {folder}/pid; worker_processes 1;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 0;
  upstream any {{ {http} }}
  upstream sticky {{ hash $http_authorization consistent; {http} }}
  upstream calls {{ {grpc} }}
  proxy_http_version 1.1; proxy_set_header Connection "";
  server {{ listen 127.0.0.1:{any}; location / {{ proxy_pass http://any; }} }}
  server {{ listen 127.0.0.1:{sticky}; location / {{ proxy_pass http://sticky; }} }}
  server {{ listen 127.0.0.1:{calls} http2; location / {{ grpc_pass grpc://calls; }} }}
}}
"""
ONES = np.ones((1, 1, 2, 2), np.float32)


class Replicas(NamedTuple):
    """Two servers, and nginx's ports: HTTP round robin, HTTP by key, and gRPC round robin."""

    servers: list[Served]
    any: str
    sticky: str
    grpc: str
    keys: dict[str, str]
    only: Callable[[list[Served]], None]
    """Make nginx use these servers only, as a platform does with ready pods."""

    def client(self, url: str, name: str = "ada") -> convgrad.Client:
        return convgrad.Client(url, api_key=self.keys[name], max_retries=0)

    def computed(self) -> list[float]:
        """Number of successful requests of each server."""
        line = 'convgrad_requests_by_code_total{code="ok"} '
        headers = {"Authorization": f"Bearer {self.keys['ada']}"}
        texts = [httpx.get(f"{one.url}/metrics", headers=headers).text for one in self.servers]
        return [float(text.partition(line)[2].partition("\n")[0]) for text in texts]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@contextmanager
def replicas(folder: Path, **settings: str) -> Iterator[Replicas]:
    keys = {name: new_key() for name in ("ada", "bob")}
    limits = {"ada": "", "bob": " max_requests_per_s=0.01"}
    lines = [f"{name}:{hash_of(key)}{limits[name]}" for name, key in keys.items()]
    (folder / "keys").write_text("\n".join(lines))
    ports = dict(zip(("any", "sticky", "calls"), free_ports(3), strict=True))
    with ExitStack() as stack:
        settings = {"CONVGRAD_API_KEYS": str(folder / "keys"), "CONVGRAD_THREADS": "1", **settings}
        servers = [stack.enter_context(server(**settings)) for _ in range(2)]

        def configure(chosen: list[Served]) -> None:
            http = " ".join(f"server {one.url.partition('//')[2]};" for one in chosen)
            calls = " ".join(f"server {one.grpc};" for one in chosen)
            text = CONFIGURATION.format(folder=folder, http=http, grpc=calls, **ports)
            (folder / "nginx.conf").write_text(text)

        configure(servers)
        command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
        log = folder / "nginx.log"
        with log.open("wb") as stderr:
            proxy = subprocess.Popen(command, stderr=stderr)
        stack.callback(proxy.wait, 30)
        stack.callback(proxy.terminate)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}

        def answers() -> bool:
            assert proxy.poll() is None, log.read_text()
            try:
                return httpx.get(f"{urls['any']}/v2/health/ready").is_success
            except httpx.TransportError:
                return False

        until(answers)
        grpc_address = urls["calls"].partition("//")[2]

        def only(chosen: list[Served]) -> None:
            configure(chosen)
            proxy.send_signal(signal.SIGHUP)

        yield Replicas(servers, urls["any"], urls["sticky"], grpc_address, keys, only)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("nginx")) as found:
        yield found


def test_results_of_both_are_bitwise_identical(pair: Replicas) -> None:
    rng = np.random.default_rng(0)
    grad_output = rng.standard_normal((2, 8, 9, 9), dtype=np.float32)
    weight = rng.standard_normal((8, 4, 3, 3), dtype=np.float32)
    before = pair.computed()
    with pair.client(pair.any) as client:
        answers = [client.conv_bwd_data(grad_output, weight).tobytes() for _ in range(8)]
    assert len(set(answers)) == 1
    until(lambda: sum(pair.computed()) == sum(before) + 8)
    assert all(now > then for now, then in zip(pair.computed(), before, strict=True))


def test_a_stored_tensor_is_on_one_replica(pair: Replicas) -> None:
    # With affinity, here by key, a client finds the tensor that it stored.
    with pair.client(pair.sticky) as client:
        weight = client.put("weight", ONES)
        for _ in range(6):
            assert client.conv_bwd_data(ONES, weight).sum() == 16
    # Without affinity, the other replica answers with an error, never with a wrong result.
    with pair.client(pair.any) as client:
        found = []
        for _ in range(4):
            try:
                found.append(float(client.conv_bwd_data(ONES, weight).sum()))
            except convgrad.NotFound:
                found.append(0.0)
    assert set(found) == {0.0, 16.0}


def test_limits_of_a_key_apply_per_replica(pair: Replicas) -> None:
    with pair.client(pair.any, "bob") as client:
        answered = 0
        for _ in range(6):
            try:
                client.conv_bwd_data(ONES, ONES)
                answered += 1
            except convgrad.Overloaded:
                pass
    assert answered == 2, "one per replica"


def test_grpc_clients_balance_over_several_addresses(pair: Replicas) -> None:
    """As with the addresses of a headless Service."""
    addresses = "ipv4:" + ",".join(one.grpc for one in pair.servers)
    before = pair.computed()
    options = [("grpc.lb_policy_name", "round_robin")]
    with triton_grpc.InferenceServerClient(addresses, channel_args=options) as client:
        # Until the second address is connected, all calls go to the first.
        for _ in range(200):
            infer(client, pair)
            if all(now > then for now, then in zip(pair.computed(), before, strict=True)):
                break
        else:
            pytest.fail(f"one of them computed nothing: {before}, then {pair.computed()}")
        before = pair.computed()
        for _ in range(6):
            infer(client, pair)
    until(lambda: sum(pair.computed()) == sum(before) + 6)
    assert all(now >= then + 2 for now, then in zip(pair.computed(), before, strict=True))


def infer(client: triton_grpc.InferenceServerClient, pair: Replicas) -> None:
    tensors = []
    for name in ("grad_output", "weight"):
        tensors.append(triton_grpc.InferInput(name, ONES.shape, "FP32"))
        tensors[-1].set_data_from_numpy(ONES)
    headers = {"authorization": f"Bearer {pair.keys['ada']}"}
    answer = client.infer("conv_bwd_data", tensors, headers=headers, client_timeout=30)
    assert answer.as_numpy("grad_input").sum() == 16


# No gRPC connection gets older than a part of the drain time, as in the chart.
DRAINING = {"CONVGRAD_GRPC_CONNECTION_AGE_S": "0.5", "CONVGRAD_DRAIN_S": "4"}


@pytest.mark.parametrize("proxied", [True, False], ids=["behind nginx", "behind a Service"])
def test_no_request_fails_while_one_replica_drains(tmp_path: Path, proxied: bool) -> None:
    """It reports not ready, keeps answering over HTTP and gRPC, and gets no new connections."""
    with replicas(tmp_path, **DRAINING) as pair, ExitStack() as stack:
        leaving, staying = pair.servers
        if proxied:
            http, calls, only = pair.any, pair.grpc, pair.only
        else:
            # A client's connection stays with one server, from which it has to be sent away.
            chosen = [leaving]
            address = stack.enter_context(tcp_service(lambda: chosen[0].url.partition("//")[2]))
            http = f"http://{address}"
            calls = stack.enter_context(tcp_service(lambda: chosen[0].grpc))
            only = partial(setitem, chosen, slice(None))
        with asking(pair, http, calls) as (answered, failures):
            until(lambda: bool(failures) or min(answered.values()) > 20)
            os.kill(leaving.process, signal.SIGTERM)
            until(lambda: httpx.get(f"{leaving.url}/v2/health/ready").status_code == 503)
            time.sleep(1.0)  # a platform takes a moment to react
            only([staying])
            until(lambda: not alive(leaving.process))
            before = dict(answered)
            until(lambda: bool(failures) or all(answered[one] > before[one] + 20 for one in before))
        assert failures == [], [str(one) for one in failures]


@contextmanager
def asking(
    pair: Replicas, http: str, calls: str
) -> Iterator[tuple[dict[str, int], list[BaseException]]]:
    """Send requests over HTTP and gRPC, each from one client; yield their number and failures."""
    answered = {"http": 0, "grpc": 0}
    failures: list[BaseException] = []
    ended = threading.Event()

    def ask_http() -> None:
        with pair.client(http) as client:
            while not ended.is_set():
                client.conv_bwd_data(ONES, ONES)
                answered["http"] += 1

    def ask_grpc() -> None:
        with triton_grpc.InferenceServerClient(calls) as client:
            while not ended.is_set():
                infer(client, pair)
                answered["grpc"] += 1

    def record_failure(ask: Callable[[], None]) -> None:
        try:
            ask()
        except BaseException as error:  # noqa: BLE001 - makes the test fail
            failures.append(error)

    threads = [threading.Thread(target=record_failure, args=(ask,)) for ask in (ask_http, ask_grpc)]
    for one in threads:
        one.start()
    try:
        yield answered, failures
    finally:
        ended.set()
        for one in threads:
            one.join()
