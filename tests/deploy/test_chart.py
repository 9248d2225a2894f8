"""What the chart deploys, for values of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from convgrad import __version__
from convgrad_service.server.setting_table import setting_fields
from tests.deploy.chart import CHART, VARIANTS, rendered
from tests.deploy.compare_helm import differences

SETTINGS = {f"CONVGRAD_{name.upper()}" for name, _, _ in setting_fields()}


@pytest.fixture(params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> dict[str, Any]:
    return rendered(VARIANTS[request.param])


def pod_of(manifests: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return spec


def test_every_variant_has_what_it_asks_for() -> None:
    kinds = {name: set(rendered(values)) for name, values in VARIANTS.items()}
    usual = {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
    assert kinds["default"] == kinds["cpu"] == usual
    more = {"HorizontalPodAutoscaler", "ServiceMonitor", "PrometheusRule"}
    assert kinds["everything"] == usual | more
    assert kinds["bare"] == {"Deployment", "Service"}


def test_selectors_meet_the_pods_labels(manifests: dict[str, Any]) -> None:
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [manifests["Deployment"]["spec"]["selector"]["matchLabels"]]
    selectors.append(manifests["Service"]["spec"]["selector"])
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        if kind in manifests:
            selectors.append(manifests[kind]["spec"][field]["matchLabels"])
    if "ServiceMonitor" in manifests:
        assert (
            manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
            <= manifests["Service"]["metadata"]["labels"].items()
        )
    assert all(selector.items() <= labels for selector in selectors)


def test_the_pod_is_confined(manifests: dict[str, Any]) -> None:
    pod = pod_of(manifests)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    inner = container["securityContext"]
    assert inner["readOnlyRootFilesystem"]
    assert inner["allowPrivilegeEscalation"] is False
    assert inner["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_environment_is_settings_that_exist(manifests: dict[str, Any]) -> None:
    variables = pod_of(manifests)["containers"][0]["env"]
    assert {one["name"] for one in variables} <= SETTINGS
    assert all(isinstance(one["value"], str) for one in variables)


def test_secrets_are_mounted_where_the_settings_look() -> None:
    for name in ("everything", "mutual_tls"):
        (container,) = pod_of(rendered(VARIANTS[name]))["containers"]
        files = [one["value"] for one in container["env"] if one["value"].startswith("/etc/")]
        mounts = [
            mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")
        ]
        assert files
        for file in files:
            assert any(file.startswith(mount + "/") for mount in mounts), file


def test_probes_speak_as_the_server_does() -> None:
    kinds = {
        name: pod_of(rendered(VARIANTS[name]))["containers"][0]["readinessProbe"]
        for name in ("default", "everything", "mutual_tls")
    }
    assert kinds["default"]["httpGet"]["scheme"] == "HTTP"
    assert kinds["everything"]["httpGet"]["scheme"] == "HTTPS"
    assert kinds["mutual_tls"]["tcpSocket"] == {"port": "http"}


def test_what_runs_can_finish(manifests: dict[str, Any]) -> None:
    """The grace of the platform is longer than the server's."""
    pod = pod_of(manifests)
    values = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    grace_s = float(values.get("CONVGRAD_SHUTDOWN_GRACE_S", "30"))
    drain_s = float(values["CONVGRAD_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] > drain_s + grace_s
    # Within it the pod is seen not to be ready.
    probe = pod["containers"][0]["readinessProbe"]
    assert drain_s >= probe["periodSeconds"] * probe["failureThreshold"] + 1


def test_a_gpu_is_asked_for_where_one_computes() -> None:
    gpu = pod_of(rendered({}))
    cpu = pod_of(rendered(VARIANTS["cpu"]))
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "CONVGRAD_BACKEND", "value": "cuda"} in gpu["containers"][0]["env"]
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    assert {"name": "CONVGRAD_BACKEND", "value": "cpu"} in cpu["containers"][0]["env"]
    assert "tolerations" not in cpu


def test_scales_on_work_that_waits() -> None:
    scaled = rendered(VARIANTS["everything"])
    spec = scaled["HorizontalPodAutoscaler"]["spec"]
    assert spec["scaleTargetRef"]["name"] == scaled["Deployment"]["metadata"]["name"]
    assert "replicas" not in scaled["Deployment"]["spec"]
    assert spec["metrics"][0]["pods"]["metric"]["name"] == "convgrad_queue_depth"


def test_the_operator_gets_the_alerts_as_they_are() -> None:
    manifests = rendered(VARIANTS["everything"])
    assert manifests["PrometheusRule"]["spec"] == yaml.safe_load(
        (CHART / "alerts.yaml").read_text()
    )
    # The job that the alert for silence asks for.
    label = manifests["ServiceMonitor"]["spec"]["jobLabel"]
    assert manifests["Service"]["metadata"]["labels"][label] == "convgrad"


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_what_helm_renders_otherwise_is_said() -> None:
    ours = rendered({})
    assert differences(ours, rendered({})) == []
    theirs = rendered(VARIANTS["bare"])
    assert dict(differences(ours, theirs))["NetworkPolicy"] == "only our tests render it"
    assert dict(differences(theirs, ours))["NetworkPolicy"] == "only Helm renders it"
    assert "Helm renders" in dict(differences(ours, {**ours, "Service": {}}))["Service"]
