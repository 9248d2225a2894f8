"""The manifests that the chart renders for various values."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from convgrad import __version__
from convgrad_service.server.command import setting_fields
from tests.deploy.chart import CHART, VARIANTS, rendered
from tests.deploy.compare_helm import differences

SETTINGS = {f"CONVGRAD_{name.upper()}" for name, _, _ in setting_fields()}


@pytest.fixture(params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> dict[str, Any]:
    return rendered(VARIANTS[request.param])


def pod_of(manifests: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return spec


def container_of(manifests: dict[str, Any]) -> dict[str, Any]:
    """The server's container, which comes first."""
    container: dict[str, Any] = pod_of(manifests)["containers"][0]
    assert container["name"] == "convgrad"
    return container


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables whose values the manifest holds."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_every_variant_has_the_kinds_it_enables() -> None:
    kinds = {name: set(rendered(values)) for name, values in VARIANTS.items()}
    bare = {"Deployment", "Service", "Service-management", "Pod-test"}
    usual = bare | {"ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
    assert kinds["bare"] == bare
    assert kinds["default"] == kinds["cpu"] == usual
    more = {"HorizontalPodAutoscaler", "ServiceMonitor", "PrometheusRule", "ConfigMap-dashboard"}
    more |= {"Service-headless", "Ingress", "HTTPRoute", "GRPCRoute"}
    assert kinds["everything"] == usual | more
    assert kinds["keda"] == usual | {"ScaledObject", "ServiceMonitor"}


def test_selectors_match_the_pods_labels(manifests: dict[str, Any]) -> None:
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [manifests["Deployment"]["spec"]["selector"]["matchLabels"]]
    services = [one for one in manifests.values() if one["kind"] == "Service"]
    selectors += [one["spec"]["selector"] for one in services]
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        if kind in manifests:
            selectors.append(manifests[kind]["spec"][field]["matchLabels"])
    if "ServiceMonitor" in manifests:
        wanted = manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        found = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        assert found == [manifests["Service-management"]], "each pod is scraped once"
    assert all(selector.items() <= labels for selector in selectors)


def test_the_pod_is_confined(manifests: dict[str, Any]) -> None:
    pod = pod_of(manifests)
    container = container_of(manifests)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    inner = container["securityContext"]
    assert inner["readOnlyRootFilesystem"]
    assert inner["allowPrivilegeEscalation"] is False
    assert inner["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_security_contexts_can_leave_out_user_ids() -> None:
    pod = pod_of(rendered(VARIANTS["openshift"]))
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_a_resource_claim_replaces_the_gpu_limit() -> None:
    manifests = rendered(VARIANTS["openshift"])
    assert pod_of(manifests)["resourceClaims"] == VARIANTS["openshift"]["resourceClaims"]
    resources = container_of(manifests)["resources"]
    assert resources["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in resources["limits"]


def test_environment_is_settings_that_exist(manifests: dict[str, Any]) -> None:
    variables = container_of(manifests)["env"]
    # OpenTelemetry's variables come from extraEnv.
    names = [one["name"] for one in variables if not one["name"].startswith("OTEL_")]
    assert set(names) <= SETTINGS
    assert len(set(names)) == len(names)
    assert all(isinstance(value, str) for value in environment_of(container_of(manifests)).values())
    # The server plans with the memory that the pod may use.
    limit = {"resourceFieldRef": {"resource": "limits.memory"}}
    assert {"name": "CONVGRAD_MEMORY_BYTES", "valueFrom": limit} in variables


def test_secrets_are_mounted_where_the_settings_look() -> None:
    for name in ("everything", "mutual_tls"):
        container = container_of(rendered(VARIANTS[name]))
        values = environment_of(container).values()
        files = [value for value in values if value.startswith("/etc/")]
        mounts = [
            mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")
        ]
        assert files
        for file in files:
            assert any(file.startswith(mount + "/") for mount in mounts), file


def test_probes_and_prometheus_use_the_management_port(manifests: dict[str, Any]) -> None:
    container = container_of(manifests)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    variables = environment_of(container)
    assert variables["CONVGRAD_MANAGEMENT_PORT"] == str(ports["management"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "management"
    if "ServiceMonitor" in manifests:
        (endpoint,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
        assert endpoint["port"] == "management"
        (port,) = manifests["Service-management"]["spec"]["ports"]
        assert port["targetPort"] == "management"
        rules = manifests["NetworkPolicy"]["spec"]["ingress"]
        peers = [
            rule["from"]
            for rule in rules
            if rule["ports"] == [{"port": "management", "protocol": "TCP"}]
        ]
        assert peers, "the NetworkPolicy blocks Prometheus"
        assert peers[0]
    # The Service that may be exposed has no management port.
    assert "management" not in {port["name"] for port in manifests["Service"]["spec"]["ports"]}


def test_app_protocols_follow_tls() -> None:
    spoken = {
        name: {
            port["name"]: port["appProtocol"]
            for port in rendered(VARIANTS[name])["Service"]["spec"]["ports"]
        }
        for name in ("default", "mutual_tls")
    }
    assert spoken["default"] == {"http": "http", "grpc": "kubernetes.io/h2c"}
    assert spoken["mutual_tls"] == {"http": "https", "grpc": "https"}


def test_egress_is_limited_to_dns_and_traces() -> None:
    policy = rendered({})["NetworkPolicy"]["spec"]
    assert policy["egress"] == []
    assert "Egress" in policy["policyTypes"]
    manifests = rendered(VARIANTS["everything"])
    open_ports = [
        port["port"]
        for rule in manifests["NetworkPolicy"]["spec"]["egress"]
        for port in rule.get("ports", [])
    ]
    assert open_ports == [53, 53, 4318]
    variables = environment_of(container_of(manifests))
    assert ":4318/" in variables["CONVGRAD_OTLP_ENDPOINT"]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector:4417/v1/traces", 4417),
        ("https://traces.example/v1/traces", 443),
        ("http://[fd00::1]/v1/traces", 80),
    ],
)
def test_egress_is_to_the_collectors_port(endpoint: str, port: int) -> None:
    policy = rendered({"tracing": {"endpoint": endpoint}})["NetworkPolicy"]["spec"]
    assert policy["egress"][1]["ports"] == [{"port": port, "protocol": "TCP"}]


def test_the_schema_covers_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: Any, schema: Any, at: str) -> None:
        if isinstance(values, dict) and "properties" in schema and at != ".settings":
            assert schema["additionalProperties"] is False, at
            known = schema["properties"].keys() - {"global"}  # Helm's own
            assert known == values.keys(), at
            for name, value in values.items():
                compare(value, schema["properties"][name], f"{at}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_settings_cannot_repeat_what_the_chart_sets() -> None:
    """A variable given twice is refused by server-side apply."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = {
        name
        for name, is_allowed in schema["properties"]["settings"]["properties"].items()
        if is_allowed is False
    }
    template = (CHART / "templates/deployment.yaml").read_text()
    assert refused == set(re.findall(r"\bname: (CONVGRAD_\w+)", template))


def test_running_requests_can_finish(manifests: dict[str, Any]) -> None:
    """The kubelet waits longer than the server, and the server as long as a request may take."""
    pod = pod_of(manifests)
    values = environment_of(container_of(manifests))
    grace_s = float(values["CONVGRAD_SHUTDOWN_GRACE_S"])
    drain_s = float(values["CONVGRAD_DRAIN_S"])
    assert grace_s == float(values["CONVGRAD_MAX_TIMEOUT_S"])
    assert pod["terminationGracePeriodSeconds"] > drain_s + grace_s
    # Within the drain time the readiness probe fails, and then every gRPC connection reaches its
    # age, to which grpc adds up to 10 %.
    probe = container_of(manifests)["readinessProbe"]
    noticed_s = probe["periodSeconds"] * probe["failureThreshold"] + 1
    assert drain_s >= noticed_s + 1.1 * float(values["CONVGRAD_GRPC_CONNECTION_AGE_S"])


def test_running_requests_can_finish_in_kserve() -> None:
    folder = CHART.parents[1] / "kserve"
    runtime = yaml.safe_load((folder / "servingruntime.yaml").read_text())
    predictor = yaml.safe_load((folder / "inferenceservice.yaml").read_text())["spec"]["predictor"]
    (container,) = runtime["spec"]["containers"]
    values = environment_of(container)
    timeout_s = float(values["CONVGRAD_MAX_TIMEOUT_S"])
    drain_s = float(values["CONVGRAD_DRAIN_S"])
    assert float(values["CONVGRAD_SHUTDOWN_GRACE_S"]) == timeout_s
    assert predictor["timeout"] > timeout_s
    assert predictor["terminationGracePeriodSeconds"] > drain_s + timeout_s
    assert {one["name"] for one in container["env"]} <= SETTINGS


def test_gpu_and_cpu_variants() -> None:
    gpu = pod_of(rendered({}))
    cpu = pod_of(rendered(VARIANTS["cpu"]))
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "CONVGRAD_BACKEND", "value": "cuda"} in gpu["containers"][0]["env"]
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    assert {"name": "CONVGRAD_BACKEND", "value": "cpu"} in cpu["containers"][0]["env"]
    assert "tolerations" not in cpu


def test_scales_on_the_queue() -> None:
    scaled = rendered(VARIANTS["everything"])
    spec = scaled["HorizontalPodAutoscaler"]["spec"]
    assert spec["scaleTargetRef"]["name"] == scaled["Deployment"]["metadata"]["name"]
    assert "replicas" not in scaled["Deployment"]["spec"]
    assert spec["metrics"][0]["pods"]["metric"]["name"] == "convgrad_queue_depth"


def test_the_prometheus_rule_contains_the_alerts() -> None:
    manifests = rendered(VARIANTS["everything"])
    spec = manifests["PrometheusRule"]["spec"]
    assert spec == yaml.safe_load((CHART / "alerts.yaml").read_text())
    page = (CHART.parents[2] / "docs/guides/runbooks.md").read_text()
    for rule in spec["groups"][0]["rules"]:
        _, _, anchor = rule["annotations"]["runbook_url"].partition("docs/guides/runbooks.md#")
        assert anchor == rule["alert"].lower()
        assert f"\n## {rule['alert']}\n" in page
    elsewhere = {"prometheusRule": {"enabled": True, "runbooks": "https://docs.example/"}}
    rules = rendered(elsewhere)["PrometheusRule"]["spec"]["groups"][0]["rules"]
    address = "https://docs.example/docs/guides/runbooks.md#convgraddown"
    assert rules[0]["annotations"]["runbook_url"] == address
    # The job that the alert ConvgradDown expects.
    label = manifests["ServiceMonitor"]["spec"]["jobLabel"]
    assert manifests["Service-management"]["metadata"]["labels"][label] == "convgrad"


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_differences_to_helm_are_reported() -> None:
    ours = rendered({})
    assert differences(ours, rendered({})) == []
    theirs = rendered(VARIANTS["bare"])
    assert dict(differences(ours, theirs))["NetworkPolicy"] == "only our tests render it"
    assert dict(differences(theirs, ours))["NetworkPolicy"] == "only Helm renders it"
    assert "Helm renders" in dict(differences(ours, {**ours, "Service": {}}))["Service"]
