"""A client that openapi-python-client generates from ``/openapi.json`` calls a real server."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad.contract import OPERATIONS
from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import LiveServer, serving

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(CpuBackend(), log_level="error") as server:
        yield server


@pytest.fixture(scope="module")
def generated(
    live: LiveServer, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Generate the package, make it importable, and return its name."""
    tools = request.config.getoption("--generators")
    if tools is None:
        pytest.skip("needs --generators, an environment with openapi-python-client")
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(live.get("/openapi.json").text)
    # The generator does not know safetensors' media type; it treats this one as bytes.
    overrides = {"application/vnd.safetensors": "application/octet-stream"}
    (folder / "config.json").write_text(
        json.dumps({"content_type_overrides": overrides, "post_hooks": []})
    )
    generator = Path(tools).resolve() / "bin" / "openapi-python-client"
    command = [generator, "generate", "--meta", "none"]
    command += ["--path", "openapi.json", "--config", "config.json", "--output-path", "made_client"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout, done.stdout
    sys.path.insert(0, str(folder))
    yield "made_client"
    sys.path.remove(str(folder))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_an_endpoint_that_works(
    generated: str, live: LiveServer, operation: str
) -> None:
    made = importlib.import_module(generated)
    endpoint = importlib.import_module(f"{generated}.api.operations.{operation}")
    models = vars(importlib.import_module(f"{generated}.models"))
    named = OPERATIONS[operation].request.__name__.lower()  # the generator writes 3D for 3d
    (request,) = [model for name, model in models.items() if name.lower() == named]
    with made.Client(live.url) as client:
        body = request.from_dict(dict(OPERATIONS[operation].example))
        answer = endpoint.sync_detailed(client=client, body=body)
    assert answer.status_code == 200, answer.content
    assert answer.parsed.report.backend == "cpu"
    assert OPERATIONS[operation].outputs[0] in answer.parsed.to_dict()


def test_tensors_are_stored_listed_and_deleted(generated: str, live: LiveServer) -> None:
    made = importlib.import_module(generated)
    api = {
        name: importlib.import_module(f"{generated}.api.stored_tensors.{name}")
        for name in ("put_tensor", "list_tensors", "drop_tensor")
    }
    models = importlib.import_module(f"{generated}.models")
    with made.Client(live.url) as client:
        body = models.ValuesTensor.from_dict({"values": [[1.0, 2.0]], "dtype": "float32"})
        described = api["put_tensor"].sync(name="w", client=client, body=body)
        assert (described.name, described.shape) == ("w", [1, 2])
        assert [each.name for each in api["list_tensors"].sync(client=client).tensors] == ["w"]
        api["drop_tensor"].sync(name="w", client=client)
        assert api["list_tensors"].sync(client=client).tensors == []
