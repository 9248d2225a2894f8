"""The engine's counters in the form of the protocol's statistics extension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from convgrad_service.engine.telemetry.statistics import Duration, OperationStatistics
from convgrad_service.oip.fields import VERSION

__all__ = ["model_statistics"]


def model_statistics(
    counts: Mapping[str, OperationStatistics], operations: Iterable[str]
) -> dict[str, Any]:
    """Return the counters of ``operations`` as JSON, whose names the gRPC message shares.

    Nothing is batched or cached: each request is one execution of batch size 1.
    """
    return {
        "model_stats": [
            _model(name, counts.get(name, OperationStatistics())) for name in operations
        ]
    }


def _model(name: str, counts: OperationStatistics) -> dict[str, Any]:
    computed = {
        "compute_input": _duration(counts.input),
        "compute_infer": _duration(counts.infer),
        "compute_output": _duration(counts.output),
    }
    return {
        "name": name,
        "version": VERSION,
        "last_inference": counts.last_inference_ms,
        "inference_count": counts.success.count,
        "execution_count": counts.success.count,
        "inference_stats": {
            "success": _duration(counts.success),
            "fail": _duration(counts.fail),
            "queue": _duration(counts.queue),
            **computed,
            "cache_hit": _duration(Duration()),
            "cache_miss": _duration(Duration()),
        },
        "batch_stats": [{"batch_size": 1, **computed}] if counts.success.count else [],
        "memory_usage": [],
        "response_stats": {},
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
