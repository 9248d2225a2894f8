"""Ray Serve's configuration, as far as it can be read without Ray; `make ray` runs it all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from convgrad_service.server.ray_options import Options
from convgrad_service.server.setting_table import setting_fields

ROOT = Path(__file__).parents[2]
CONFIGURATION = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
(APPLICATION,) = CONFIGURATION["applications"]


def test_its_arguments_are_options_that_exist() -> None:
    options = Options.model_validate(APPLICATION["args"])
    assert options.gpus_per_replica == 1, "a replica for each GPU is what the page promises"
    assert options.max_replicas > options.min_replicas
    assert set(options.settings) <= {name for name, _, _ in setting_fields()}
    with pytest.raises(ValidationError):
        Options.model_validate({**APPLICATION["args"], "max_replica": 2})


def test_what_it_imports_is_there() -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    source = (ROOT / "service" / module.replace(".", "/")).with_suffix(".py").read_text()
    defined = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert name in defined
