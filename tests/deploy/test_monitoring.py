"""The dashboard and the compose file agree with the server and with each other."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.settings import setting_fields
from tests.contract.server import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
_METRIC = re.compile(r"\b((?:convgrad|process)_[a-z_]+)\{")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = runpy.run_path(str(DEPLOY / "grafana/dashboard.py"))["dashboard"]()
    return made


def test_the_dashboard_is_what_its_code_makes(dashboard: dict[str, Any]) -> None:
    assert json.loads((DEPLOY / "grafana/dashboards/convgrad.json").read_text()) == dashboard


def test_every_metric_of_the_dashboard_is_offered(dashboard: dict[str, Any]) -> None:
    with serving(CpuBackend(threads=1)) as server:
        assert server.post().status_code == 200
        offered = server.get("/metrics").text
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    wanted = {name for query in queries for name in _METRIC.findall(query)}
    assert len(wanted) >= 10
    missing = [name for name in wanted if not re.search(rf"^{name}[{{ ]", offered, re.MULTILINE)]
    assert missing == []


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_compose_mounts_what_is_there_and_sets_what_exists() -> None:
    folder = DEPLOY / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    settings = {f"CONVGRAD_{name.upper()}" for name, _, _ in setting_fields()}
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("..") or (folder / source).exists(), source
        given = {name for name in service.get("environment", {}) if name.startswith("CONVGRAD_")}
        assert given <= settings
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
    assert services["convgrad-gpu"]["read_only"] is services["convgrad-cpu"]["read_only"] is True


def test_prometheus_scrapes_the_composed_server() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    (job,) = scraped["scrape_configs"]
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    for name in ("convgrad-cpu", "convgrad-gpu"):
        assert host in services[name]["networks"]["default"]["aliases"]
        assert any(published.endswith(f":{port}") for published in services[name]["ports"])
