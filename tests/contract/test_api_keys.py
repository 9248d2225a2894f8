"""API keys on real servers: who has access over each transport, and who owns which tensors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from starlette.applications import Starlette
from starlette.routing import Mount
from tritonclient.utils import InferenceServerException

import convgrad
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.security.keys import hash_of, new_key
from convgrad_service.server.composition import create_app
from convgrad_service.server.settings import Settings
from tests.support.fake_backends import Zeros
from tests.support.http_server import EXAMPLE, JSON
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import until


class Guarded(NamedTuple):
    server: OipServer
    keys: Mapping[str, str]
    file: Path

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"}

    def get(self, path: str, name: str | None = None) -> httpx.Response:
        headers = self.headers(name) if name else {}
        return httpx.get(f"http://{self.server.http}{path}", headers=headers, timeout=60)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    keys = {name: new_key() for name in ("ada", "bob", "prometheus")}
    lines = [f"{name}:{hash_of(key)}" for name, key in keys.items()]
    file.write_text("\n".join([*lines[:-1], f"{lines[-1]} scopes=metrics"]))
    with serving_oip(CpuBackend(threads=1), api_keys=file, log_level="info") as server:
        yield Guarded(server, keys, file)


@pytest.mark.parametrize(
    "path",
    ["/operations", "/metrics", "/v2", "/v2/models/conv_fwd", "/tensors", "/nothing-here"],
)
def test_nothing_is_said_without_a_key(guarded: Guarded, path: str) -> None:
    refused = guarded.get(path)
    assert refused.status_code == 401
    assert refused.json()["code"] == "unauthenticated"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert guarded.get(path, "ada").status_code != 401


@pytest.mark.parametrize("path", ["/docs", "/docs/assets/swagger-ui.css", "/openapi.json"])
def test_the_description_of_the_api_is_open(guarded: Guarded, path: str) -> None:
    assert guarded.get(path).status_code == 200
    assert guarded.get("/docs/assets/../../metrics").status_code in (401, 404)


def test_openapi_says_what_needs_a_key_and_how_to_send_it(guarded: Guarded) -> None:
    """Without this, the page at /docs has no field for a key and each of its requests fails."""
    document = guarded.get("/openapi.json").json()
    (required,) = document["security"]
    (scheme,) = (document["components"]["securitySchemes"][name] for name in required)
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, item in document["paths"].items():
        for described in (item[method] for method in item if method != "parameters"):
            is_open = guarded.get(path).status_code != 401 if "{" not in path else False
            assert ({"401", "403"} <= described["responses"].keys()) is not is_open, path
            assert (described.get("security") == []) is is_open, path


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_the_platform_may_always_ask(guarded: Guarded, path: str) -> None:
    assert guarded.get(path).status_code == 200


def test_the_sdk_brings_its_key(guarded: Guarded) -> None:
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((3, 2, 1, 1), np.float32)
    url = f"http://{guarded.server.http}"
    with convgrad.Client(url, headers=guarded.headers("ada")) as client:
        assert (client.conv_fwd(x, w) == 2).all()
    with convgrad.Client(url, max_retries=0) as client, pytest.raises(convgrad.Unauthenticated):
        client.conv_fwd(x, w)


def test_grpc_needs_a_key_too(guarded: Guarded) -> None:
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((3, 2, 1, 1), np.float32)
    inputs = []
    for name, array in (("input", x), ("weight", w)):
        inputs.append(triton_grpc.InferInput(name, list(array.shape), "FP32"))
        inputs[-1].set_data_from_numpy(array)
    key = {key.lower(): value for key, value in guarded.headers("bob").items()}
    with triton_grpc.InferenceServerClient(guarded.server.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        answer = client.infer("conv_fwd", inputs, headers=key)
        assert (answer.as_numpy("output") == 2).all()
        assert client.get_server_metadata(headers=key).name
        for refused in (
            lambda: client.infer("conv_fwd", inputs),
            lambda: client.get_server_metadata(),
            lambda: client.get_model_repository_index(),
            lambda: client.infer("conv_fwd", inputs, headers={"authorization": "Bearer no"}),
        ):
            with pytest.raises(InferenceServerException) as error:
                refused()
            assert error.value.status() == str(grpc.StatusCode.UNAUTHENTICATED)


def test_an_application_that_is_mounted_has_the_same_scopes(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys"
    file.write_text(f"ada:{hash_of(key)} scopes=infer")
    app = create_app(Settings(api_keys=file, system_shared_memory=True), Zeros())
    mounted = httpx.ASGITransport(Starlette(routes=[Mount("/gpu", app)]))

    bearer = {"Authorization": f"Bearer {key}", "Content-Type": JSON}

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=mounted, base_url="http://x/gpu") as client:
            register = "/v2/systemsharedmemory/region/x/register"
            return [
                (await client.request(method, path, headers=headers, content=EXAMPLE)).status_code
                for method, path, headers in (
                    ("GET", "/v2/health/live", {}),
                    ("GET", "/docs", {}),
                    ("GET", "/metrics", bearer),
                    ("POST", register, bearer),
                    ("POST", "/conv_bwd_data", {}),
                    (
                        "POST",
                        "/conv_bwd_data",
                        {"Authorization": f"Bearer {key}", "Content-Type": JSON},
                    ),
                )
            ]

    try:
        assert asyncio.run(statuses()) == [200, 200, 403, 403, 401, 200]
    finally:
        app.state.pipeline.close()
        app.state.pipeline.engine.close()


def test_a_key_does_what_its_scopes_say(guarded: Guarded) -> None:
    url = f"http://{guarded.server.http}"
    ones = np.ones((1, 1, 1, 1), np.float32)
    assert guarded.get("/metrics", "prometheus").status_code == 200
    assert guarded.get("/tensors", "prometheus").status_code == 403
    with (
        convgrad.Client(url, api_key=guarded.keys["prometheus"]) as client,
        pytest.raises(convgrad.PermissionDenied, match="'prometheus' has the scopes metrics"),
    ):
        client.conv_fwd(ones, ones)
    key = {key.lower(): value for key, value in guarded.headers("prometheus").items()}
    tensor = triton_grpc.InferInput("input", [1, 1, 1, 1], "FP32").set_data_from_numpy(ones)
    with triton_grpc.InferenceServerClient(guarded.server.grpc) as client:
        assert client.get_inference_statistics(headers=key).model_stats
        with pytest.raises(InferenceServerException, match="needs the scope infer") as error:
            client.infer("conv_fwd", [tensor], headers=key)
    assert error.value.status() == str(grpc.StatusCode.PERMISSION_DENIED)
    until(lambda: refusals(guarded, "permission-denied") == 3)


def refusals(guarded: Guarded, code: str) -> float:
    """Return how many requests with this outcome a server has counted."""
    text = guarded.get("/metrics", "ada").text
    line = f'convgrad_requests_by_code_total{{code="{code}"}} '
    (found,) = (one for one in text.splitlines() if one.startswith(line))
    return float(found.removeprefix(line))


def test_stored_tensors_are_their_owners(guarded: Guarded) -> None:
    url = f"http://{guarded.server.http}"
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((3, 2, 1, 1), np.float32)
    ada = convgrad.Client(url, headers=guarded.headers("ada"))
    bob = convgrad.Client(url, headers=guarded.headers("bob"))
    with ada, bob:
        weight = ada.put("weight", w)
        assert (ada.conv_fwd(x, weight) == 2).all()
        assert guarded.get("/tensors", "bob").json() == {"tensors": []}
        with pytest.raises(convgrad.NotFound):
            bob.conv_fwd(x, weight)
        bob.put("weight", 2 * w)
        assert (ada.conv_fwd(x, weight) == 2).all()
        assert (bob.conv_fwd(x, weight) == 4).all()


def test_logs_name_the_key_and_never_hold_it(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="convgrad.access"):
        guarded.get("/operations", "ada")
        httpx.get(
            f"http://{guarded.server.http}/operations", headers={"Authorization": "Bearer cg_other"}
        )
    # A line is written once its answer has left.
    until(lambda: "key=ada " in caplog.text and "code=unauthenticated" in caplog.text)
    for secret in (*guarded.keys.values(), "cg_other"):
        assert secret not in caplog.text
        assert hash_of(secret) not in caplog.text


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_no_page_of_another_origin_is_answered_to(guarded: Guarded, method: str) -> None:
    """CORS is off: a browser is told of no origin that may read an answer."""
    asked = {
        "Origin": "https://elsewhere.example",
        "Access-Control-Request-Method": "POST",
        **guarded.headers("ada"),
    }
    answer = httpx.request(
        method, f"http://{guarded.server.http}/operations", headers=asked, timeout=60
    )
    assert [name for name in answer.headers if name.startswith("access-control-")] == []
