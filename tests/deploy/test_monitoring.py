"""The dashboard, the alerts and the compose file match the server's metrics and settings."""

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
from convgrad_service.server.command import setting_fields
from tests.deploy.chart import VARIANTS, rendered
from tests.support.http_server import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
_METRIC = re.compile(r"\b((?:convgrad|process)_[a-z_]+)\b(?!=)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = runpy.run_path(str(DEPLOY / "grafana/dashboard.py"))["dashboard"]()
    return made


def test_the_dashboard_is_up_to_date(dashboard: dict[str, Any]) -> None:
    assert json.loads((DEPLOY / "helm/convgrad/dashboard.json").read_text()) == dashboard


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a server that has answered one request of a key and refused another."""
    key, file = new_key(), tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"ada:{hash_of(key)}")
    headers = {"Authorization": f"Bearer {key}"}
    settings = {"api_keys": file, "key_max_requests_per_s": 0.01}
    with serving(CpuBackend(threads=1), **settings) as server:
        assert [server.post(headers=headers).status_code for _ in range(2)] == [200, 429]
        return server.get("/metrics", headers).text


def _missing(queries: list[str], metrics: str) -> list[str]:
    wanted = {name for query in queries for name in _METRIC.findall(query)}
    assert len(wanted) >= 7
    return [name for name in wanted if not re.search(rf"^{name}[{{ ]", metrics, re.MULTILINE)]


def test_metrics_of_the_dashboard_exist(dashboard: dict[str, Any], metrics: str) -> None:
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert _missing(queries, metrics) == []


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "helm/convgrad/alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_metrics_of_the_alerts_exist(metrics: str) -> None:
    assert _missing([rule["expr"] for rule in _rules()], metrics) == []


def test_metrics_of_the_documentation_exist(metrics: str) -> None:
    page = (DEPLOY / "README.md").read_text()
    rows = page.partition("| metrics | meaning |")[2].partition("\n\n")[0]
    named = re.findall(r"`((?:convgrad|nv)_[a-z_]*)(?:\{([a-z_,]+)\}([a-z_]*))?", rows)
    names = {
        before + one + after for before, inner, after in named for one in inner.split(",")
    }  # `a_{b,c}_d` is two names
    assert len(names) >= 25, names
    # A histogram's own name has no series, which are its `_bucket`, `_sum` and `_count`.
    missing = [n for n in names if not re.search(rf"^(# TYPE )?{n}[{{ ]", metrics, re.MULTILINE)]
    assert missing == []


def test_the_reference_has_every_metric(metrics: str) -> None:
    """With its type, its labels and the sentence that the server itself says of it."""
    page = (DEPLOY.parent / "docs/reference/metrics.md").read_text()
    rows = {
        name: rest
        for name, *rest in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \| (.*) \|$", page, re.M)
    }
    families = re.findall(
        r"^# HELP (\S+) (.*)\n# TYPE \S+ (\w+)\n((?:[^#].*\n)*)", metrics, re.MULTILINE
    )
    for name, text, kind, samples in families:
        listed_kind, listed_labels, listed_text = rows.pop(name)
        assert (listed_kind, listed_text) == (kind, text)
        if samples:
            labels = set(re.findall(r'(\w+)="', samples)) - {"le"}
            assert set(re.findall(r"`(\w+)`", listed_labels)) == labels, name
    # These are added by the process tree, which the server here lacks.
    assert {name for name in rows if not name.startswith("convgrad_process_")} == {
        "convgrad_connections"
    }


def test_every_alert_is_tested_firing_and_silent() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
    for name, fires in (("a healthy server", False), ("an unhealthy server", True)):
        (test,) = (one for one in tests if one["name"] == name)
        tested = {
            one["alertname"] for one in test["alert_rule_test"] if bool(one["exp_alerts"]) == fires
        }
        assert tested == {rule["alert"] for rule in _rules()}, name


@pytest.mark.deploy
def test_promtool_accepts_the_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, from Debian's package prometheus")
    for action, file in (
        ("check", "helm/convgrad/alerts.yaml"),
        ("test", "prometheus/alerts_test.yaml"),
    ):
        done = subprocess.run(
            [promtool, action, "rules", file], cwd=DEPLOY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def adapter_queries() -> list[str]:
    """The queries that prometheus-adapter makes from our rules."""
    values = yaml.safe_load((DEPLOY / "prometheus/adapter.yaml").read_text())
    queries = []
    for rule in values["rules"]["custom"]:
        series = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        query = query.replace("<<.LabelMatchers>>", 'namespace="a",pod="b"')
        queries.append(query.replace("<<.GroupBy>>", "pod"))
    return queries


@pytest.mark.deploy
def test_promtool_accepts_the_autoscaling_queries(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, from Debian's package prometheus")
    (trigger,) = rendered(VARIANTS["keda"])["ScaledObject"]["spec"]["triggers"]
    queries = [*adapter_queries(), trigger["metadata"]["query"]]
    rules = [{"record": f"query:{number}", "expr": one} for number, one in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    command = [promtool, "check", "rules", "rules.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_of_autoscaling_exist(metrics: str) -> None:
    (trigger,) = rendered(VARIANTS["keda"])["ScaledObject"]["spec"]["triggers"]
    named = set(_METRIC.findall(" ".join([*adapter_queries(), trigger["metadata"]["query"]])))
    assert len(named) == 3
    missing = [one for one in named if not re.search(rf"^{one}[{{ ]", metrics, re.MULTILINE)]
    assert missing == []


@pytest.mark.deploy
def test_promtool_accepts_the_metrics(metrics: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, from Debian's package prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=metrics, text=True)
    assert done.returncode in (0, 3), "3 is a matter of style"


def test_metric_types_match_the_series_names(metrics: str) -> None:
    """Otherwise Prometheus treats a series as untyped."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", metrics, re.MULTILINE))
    suffixes = {"histogram": "_(bucket|sum|count)"}
    series = set(re.findall(r"^(\w+)[{ ]", metrics, re.MULTILINE))
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


def test_compose_mounts_and_settings_exist() -> None:
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
