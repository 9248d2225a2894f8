"""Ray Serve's configuration, checked without Ray; `make ray` runs the application."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from convgrad_service.server.command import setting_fields
from convgrad_service.server.ray_options import Options

ROOT = Path(__file__).parents[2]
CONFIGURATION = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
(APPLICATION,) = CONFIGURATION["applications"]


def test_arguments_are_valid_options() -> None:
    options = Options.model_validate(APPLICATION["args"])
    assert options.gpus_per_replica == 1, "deploy/README.md says one replica per GPU"
    assert options.max_replicas > options.min_replicas
    assert set(options.settings) <= {name for name, _, _ in setting_fields()}
    with pytest.raises(ValidationError):
        Options.model_validate({**APPLICATION["args"], "max_replica": 2})


def test_keys_are_required_unless_anonymous() -> None:
    assert CONFIGURATION["http_options"]["host"] == "0.0.0.0"  # noqa: S104 - on every address
    without = {**APPLICATION["args"], "settings": {}}
    with pytest.raises(ValidationError, match="expected settings with api_keys"):
        Options.model_validate(without)
    assert Options.model_validate({**without, "anonymous": True}).settings == {}


def test_the_rayservice_has_the_same_configuration() -> None:
    manifest = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == CONFIGURATION
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    arguments = APPLICATION["args"]
    limits = container["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == arguments["gpus_per_replica"]
    assert int(container["resources"]["requests"]["cpu"]) >= arguments["cpus_per_replica"]
    assert group["maxReplicas"] == arguments["max_replicas"]
    keys = arguments["settings"]["api_keys"]
    assert any(keys.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_import_path_exists() -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    source = (ROOT / "service" / module.replace(".", "/")).with_suffix(".py").read_text()
    defined = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert name in defined
