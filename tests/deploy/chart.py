"""Renders the Helm chart without Helm or a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from gotpl.exts.helm import HelmTemplateEngine

from tests.deploy.compare_helm import CHART, RELEASE, named

__all__ = ["CHART", "VARIANTS", "rendered"]

# Values that together cover every branch of every template.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "cpu": {"gpu": {"enabled": False}, "replicas": 3, "image": {"tag": "1.2.3"}},
    "everything": {
        "image": {"repository": "images.example/convgrad", "tag": "7"},
        "imagePullSecrets": [{"name": "pull"}],
        "gpu": {"runtimeClassName": "nvidia", "resource": "nvidia.com/mig-1g.18gb"},
        "settings": {"CONVGRAD_MAX_QUEUE": 16, "CONVGRAD_MAX_BODY_BYTES": 2**32},
        "service": {"annotations": {"a": "b"}, "sessionAffinity": "ClientIP", "headless": True},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "0"},
            "host": "gradients.example",
            "tlsSecret": "public-certificate",
        },
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways"}],
            "hostnames": ["gradients.example"],
        },
        "tracing": {"endpoint": "http://collector.monitoring:4318/v1/traces"},
        "extraEnv": [{"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_always_off"}],
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
        "sharedMemory": {"sizeLimit": "8Gi"},
        "sidecars": [
            {
                "name": "trainer",
                "image": "trainer:1",
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
            }
        ],
        "extraVolumes": [{"name": "layers", "configMap": {"name": "layers"}}],
        "extraVolumeMounts": [{"name": "layers", "mountPath": "/etc/convgrad/layers"}],
        "priorityClassName": "serving",
        "podLabels": {"team": "training"},
        "dashboard": {"enabled": True},
        "apiKeys": {"secret": "api-keys"},
        "tls": {"secret": "server-certificate"},
        "kernelCache": {"persistentVolumeClaim": "kernels"},
        "autoscaling": {"enabled": True, "maxReplicas": 8},
        "networkPolicy": {
            "from": [{"namespaceSelector": {"matchLabels": {"team": "training"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        },
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
        },
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "serviceAccount": {"name": "gradients", "annotations": {"c": "d"}},
        "podAnnotations": {"e": "f"},
        "nodeSelector": {"gpu": "h200"},
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
    },
    # OpenShift assigns user ids; a resource claim provides the GPU.
    "openshift": {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "gpu": {"count": 0},
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-h200"}],
    },
    "keda": {
        "autoscaling": {"enabled": True, "kind": "keda"},
        "serviceMonitor": {"enabled": True},
    },
    "mutual_tls": {"tls": {"secret": "server-certificate", "clientCa": "callers"}},
    "bare": {
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
    },
}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values as Helm does: objects by key; null removes a key; other values replace."""
    out = dict(base)
    for key, value in over.items():
        if value is None:
            out.pop(key, None)
            continue
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


class _Files:
    """Helm's `.Files`."""

    def Get(self, name: str) -> str:  # noqa: N802 - Helm's name
        return (CHART / name).read_text()


def rendered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Render the manifests, by `named`."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": _merged(yaml.safe_load((CHART / "values.yaml").read_text()), values),
        "Chart": {key[0].upper() + key[1:]: value for key, value in chart.items()},
        "Release": {"Name": RELEASE, "Namespace": "default", "Service": "Helm"},
        "Files": _Files(),
    }
    sources = {path.name: path.read_text() for path in (CHART / "templates").rglob("*.*")}
    engine = HelmTemplateEngine(sources, strict=True)
    texts = engine.render({name: context for name in sources if not name.startswith("_")})
    assert RELEASE in texts.pop("NOTES.txt")
    documents = [doc for text in texts.values() for doc in yaml.safe_load_all(text) if doc]
    names = [named(doc) for doc in documents]
    assert len(set(names)) == len(names), names
    return dict(zip(names, documents, strict=True))


def main(folder: Path) -> None:
    """Write every variant's manifests, one file each, and its values, for other programs."""
    (folder / "values").mkdir(parents=True, exist_ok=True)
    for variant, values in VARIANTS.items():
        (folder / "values" / f"{variant}.json").write_text(json.dumps(values))
        for name, manifest in rendered(values).items():
            (folder / f"{variant}-{name}.yaml").write_text(yaml.safe_dump(manifest))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
