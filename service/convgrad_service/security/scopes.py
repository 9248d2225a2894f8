"""Scopes restrict an API key to part of the server's methods, over HTTP and gRPC."""

from __future__ import annotations

from convgrad.errors import PermissionDenied
from convgrad_service.engine.scheduling.quotas import Caller

__all__ = ["ADMIN", "INFER", "METRICS", "SCOPES", "require_method", "require_path"]

INFER, METRICS, ADMIN = "infer", "metrics", "admin"
SCOPES = frozenset({INFER, METRICS, ADMIN})
"""``infer``: compute and store tensors; ``metrics``: read metrics and statistics; ``admin``:
register shared memory. Descriptions of the server need no scope."""

_FOLDERS = (
    ("/v2/systemsharedmemory", ADMIN),
    ("/v2/cudasharedmemory", ADMIN),
    ("/tensors", INFER),
    ("/metrics", METRICS),
)
# Clients of the protocol request this description of the server by POST.
_INDEX = "/v2/repository/index"
_METHODS = {
    "ModelInfer": INFER,
    "ModelStreamInfer": INFER,
    "ModelStatistics": METRICS,
}


def require_path(caller: Caller, verb: str, path: str) -> None:
    """Raise PermissionDenied unless the key may do this over HTTP."""
    if caller.scopes is None:
        return
    scope = next((scope for folder, scope in _FOLDERS if path.startswith(folder)), None)
    if scope is None and path.endswith("/stats"):
        scope = METRICS
    if scope is None and verb not in ("GET", "HEAD") and path != _INDEX:
        scope = INFER
    _require(caller, scope)


def require_method(caller: Caller, method: str) -> None:
    """Raise PermissionDenied unless the key may call this method over gRPC."""
    if caller.scopes is not None:
        _require(caller, ADMIN if "SharedMemory" in method else _METHODS.get(method))


def _require(caller: Caller, scope: str | None) -> None:
    assert caller.scopes is not None  # noqa: S101 - checked by both callers
    if scope is not None and scope not in caller.scopes:
        raise PermissionDenied(
            f"the API key {caller.name!r} has the scopes {', '.join(sorted(caller.scopes))}; this "
            f"needs the scope {scope}"
        )
