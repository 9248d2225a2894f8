"""/metrics, read by a Prometheus parser: our own names and Triton's."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from convgrad_service.backends.cpu import CpuBackend
from tests.contract.server import serving


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("model", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("nv_inference_")
    }


def test_requests_are_counted_as_triton_counts_them() -> None:
    with serving(CpuBackend(threads=1)) as server:
        for _ in range(3):
            assert server.post().status_code == 200
        # What was wrong in itself was no inference.
        assert server.post(b'{"stride": "x"}').status_code == 400
        found = samples(server.get("/metrics").text)
        model = "conv_bwd_data"
        for name in ("request_success", "count", "exec_count"):
            assert found[f"nv_inference_{name}", model] == 3
        assert found["nv_inference_request_failure", model] == 0
        assert found["nv_inference_pending_request_count", ""] == 0
        parts = ("queue", "compute_input", "compute_infer", "compute_output")
        spent_us = [found[f"nv_inference_{part}_duration_us", model] for part in parts]
        whole_us = found["nv_inference_request_duration_us", model]
        assert 0 < spent_us[2] <= sum(spent_us) <= whole_us < 3 * 20e6
        statistics = server.get(f"/v2/models/{model}/stats").json()["model_stats"][0]
        assert statistics["inference_stats"]["success"]["count"] == 3


def test_what_was_computed_is_counted() -> None:
    with serving(CpuBackend(threads=1)) as server:
        report = server.post().json()["report"]
        server.post()
        server.post(b'{"stride": "x"}')
        text = server.get("/metrics").text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("operation", "conv_bwd_data") == "conv_bwd_data"
    }
    assert report["flops"] > 0
    assert found["convgrad_computed_flops_total"] == 2 * report["flops"]
    assert found["convgrad_compulsory_bytes_total"] == 2 * report["bytes"]
    assert found["convgrad_compute_seconds_count"] == 2
    assert found["convgrad_workers"] == 1
    assert found["convgrad_workers_lost_total"] == 0
