"""/metrics, read by a Prometheus parser: our own names and Triton's."""

from __future__ import annotations

import os

import httpx
from prometheus_client.parser import text_string_to_metric_families

from convgrad_service.backends.base import Vitals
from convgrad_service.backends.cpu import CpuBackend
from tests.support.fake_backends import Zeros
from tests.support.http_server import serving
from tests.support.tree_server import serving_tree, until


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        # The parser gives every counter the suffix, whatever it was called.
        (sample.name.removesuffix("_total"), sample.labels.get("model", "")): sample.value
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
        model = "conv_bwd_data"

        def counted() -> dict[tuple[str, str], float]:
            return samples(server.get("/metrics").text)

        # Counted a moment after the answer.
        until(lambda: counted().get(("nv_inference_count", model)) == 3)
        found = counted()
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

        def counted() -> dict[str, float]:
            text = server.get("/metrics").text
            return {
                sample.name: sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.labels.get("operation", "conv_bwd_data") == "conv_bwd_data"
            }

        until(lambda: counted().get("convgrad_compute_seconds_count") == 2)
        found = counted()
    assert report["flops"] > 0
    assert found["convgrad_computed_flops_total"] == 2 * report["flops"]
    assert found["convgrad_compulsory_bytes_total"] == 2 * report["bytes"]
    assert found["convgrad_compute_seconds_count"] == 2
    assert found["convgrad_workers"] == 1
    assert found["convgrad_workers_lost_total"] == 0


class Measured(Zeros):
    """Says of its device what a GPU would."""

    def vitals(self) -> Vitals:
        return Vitals(3 * 2**30, 80 * 2**30, kernels_found=5, kernels_compiled=2, compile_s=1.5)


def measured(_: int) -> Measured:
    return Measured()


def test_workers_tell_how_their_devices_are() -> None:
    with serving_tree(measured) as server:

        def found() -> dict[str, float]:
            text = httpx.get(f"{server.url}/metrics", timeout=60).text
            return {
                sample.name: sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.labels == {"device": "0"}
            }

        until(lambda: found().get("convgrad_device_memory_used_bytes") == 3 * 2**30)
        assert found() == {
            "convgrad_device_memory_used_bytes": 3 * 2**30,
            "convgrad_device_memory_total_bytes": 80 * 2**30,
            "convgrad_kernel_cache_hits_total": 5,
            "convgrad_kernel_cache_misses_total": 2,
            "convgrad_kernel_compile_seconds_total": 1.5,
        }


def test_the_cpu_s_memory_is_the_machine_s() -> None:
    vitals = CpuBackend(threads=1).vitals()
    assert 0 < vitals.memory_used_bytes < vitals.memory_total_bytes
    assert vitals.memory_total_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
