"""The dashboard and the compose file agree with the server and with each other."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.security.keys import hash_of, new_key
from convgrad_service.server.setting_table import setting_fields
from tests.deploy.chart import VARIANTS, rendered
from tests.support.http_server import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
_METRIC = re.compile(r"\b((?:convgrad|process)_[a-z_]+)\b(?!=)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = runpy.run_path(str(DEPLOY / "grafana/dashboard.py"))["dashboard"]()
    return made


def test_the_dashboard_is_what_its_code_makes(dashboard: dict[str, Any]) -> None:
    assert json.loads((DEPLOY / "helm/convgrad/dashboard.json").read_text()) == dashboard


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a server offers that has answered, and refused, somebody with a key."""
    key, file = new_key(), tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"ada:{hash_of(key)}")
    headers = {"Authorization": f"Bearer {key}"}
    settings = {"api_keys": file, "key_max_requests_per_s": 0.01}
    with serving(CpuBackend(threads=1), **settings) as server:
        assert [server.post(headers=headers).status_code for _ in range(2)] == [200, 429]
        return server.get("/metrics", headers).text


def _missing(queries: list[str], offered: str) -> list[str]:
    wanted = {name for query in queries for name in _METRIC.findall(query)}
    assert len(wanted) >= 7
    return [name for name in wanted if not re.search(rf"^{name}[{{ ]", offered, re.MULTILINE)]


def test_every_metric_of_the_dashboard_is_offered(dashboard: dict[str, Any], offered: str) -> None:
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert _missing(queries, offered) == []


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "helm/convgrad/alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_every_metric_of_the_alerts_is_offered(offered: str) -> None:
    assert _missing([rule["expr"] for rule in _rules()], offered) == []


def test_every_metric_of_the_page_is_offered(offered: str) -> None:
    page = (DEPLOY / "README.md").read_text()
    rows = page.partition("| metrics | meaning |")[2].partition("\n\n")[0]
    named = re.findall(r"`((?:convgrad|nv)_[a-z_]*)(?:\{([a-z_,]+)\}([a-z_]*))?", rows)
    names = {
        before + one + after for before, inner, after in named for one in inner.split(",")
    }  # `a_{b,c}_d` is two names
    assert len(names) >= 25, names
    # A histogram's own name has no series, which are its `_bucket`, `_sum` and `_count`.
    missing = [n for n in names if not re.search(rf"^(# TYPE )?{n}[{{ ]", offered, re.MULTILINE)]
    assert missing == []


def test_every_alert_is_tried_firing_and_silent() -> None:
    tried = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
    for wanted, name in zip(((), ("some",)), ("that is well", "that is not"), strict=True):
        (test,) = (one for one in tried if one["name"].endswith(name))
        some = {one["alertname"] for one in test["alert_rule_test"] if one["exp_alerts"]}
        none = {one["alertname"] for one in test["alert_rule_test"] if not one["exp_alerts"]}
        assert {rule["alert"] for rule in _rules()} == (some if wanted else none), name


@pytest.mark.deploy
def test_prometheus_agrees_about_the_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: it comes with Debian's package prometheus")
    for action, file in (
        ("check", "helm/convgrad/alerts.yaml"),
        ("test", "prometheus/alerts_test.yaml"),
    ):
        done = subprocess.run(
            [promtool, action, "rules", file], cwd=DEPLOY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def adapted() -> list[str]:
    """What prometheus-adapter would ask of a pod, by each of our rules."""
    values = yaml.safe_load((DEPLOY / "prometheus/adapter.yaml").read_text())
    queries = []
    for rule in values["rules"]["custom"]:
        series = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        query = query.replace("<<.LabelMatchers>>", 'namespace="a",pod="b"')
        queries.append(query.replace("<<.GroupBy>>", "pod"))
    return queries


@pytest.mark.deploy
def test_prometheus_can_read_what_scaling_asks(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: it comes with Debian's package prometheus")
    (trigger,) = rendered(VARIANTS["keda"])["ScaledObject"]["spec"]["triggers"]
    queries = [*adapted(), trigger["metadata"]["query"]]
    rules = [{"record": f"asked:{number}", "expr": one} for number, one in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    command = [promtool, "check", "rules", "rules.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scaling_asks_for_metrics_that_are_offered(offered: str) -> None:
    (trigger,) = rendered(VARIANTS["keda"])["ScaledObject"]["spec"]["triggers"]
    named = set(_METRIC.findall(" ".join([*adapted(), trigger["metadata"]["query"]])))
    assert len(named) == 3
    missing = [one for one in named if not re.search(rf"^{one}[{{ ]", offered, re.MULTILINE)]
    assert missing == []


@pytest.mark.deploy
def test_prometheus_agrees_about_the_metrics(offered: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: it comes with Debian's package prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=offered, text=True)
    assert done.returncode in (0, 3), "3 is a matter of style"


def test_what_a_metric_is_typed_as_is_how_its_series_are_named(offered: str) -> None:
    """Else Prometheus takes the series for one of an unknown type."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", offered, re.MULTILINE))
    suffixes = {"histogram": "_(bucket|sum|count)"}
    series = set(re.findall(r"^(\w+)[{ ]", offered, re.MULTILINE))
    known = {
        name
        for name in series
        for typed, kind in types.items()
        if re.fullmatch(typed + suffixes.get(kind, ""), name)
    }
    assert types["nv_inference_request_success"] == "counter"
    assert series == known


def test_a_request_without_a_key_is_counted(tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "keys").write_text(f"ada:{hash_of(key)}")
    with serving(CpuBackend(threads=1), api_keys=tmp_path / "keys") as server:
        assert server.post().status_code == 401
        metrics = server.get("/metrics", {"Authorization": f"Bearer {key}"}).text
    assert 'convgrad_requests_by_code_total{code="unauthenticated"} 1.0' in metrics
    assert 'nv_inference_request_failure{model=""' not in metrics


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
