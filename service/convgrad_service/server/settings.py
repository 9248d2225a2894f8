"""Every setting of the server, in one place: name, default, unit, meaning.

Each field is read from the environment variable ``CONVGRAD_`` + its name in capitals; the command
line of ``convgrad serve`` is made from the same class. Nothing else reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from convgrad_service.engine.scheduling.quotas import KeyLimits
from convgrad_service.security.keys import read_keys
from convgrad_service.server.warm_up import read_warm_up

__all__ = ["Settings"]

_PREFIX = "CONVGRAD_"
_OF_THE_CLIENT = ("CONVGRAD_URL", "CONVGRAD_API_KEY")
_OF_A_SERVICE = re.compile(
    r"CONVGRAD_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_TCP(_(PROTO|PORT|ADDR))?)?)"
)

_KiB, _MiB, _GiB = 2**10, 2**20, 2**30

# gt=0 everywhere it means something: a limit of zero is a server that refuses all, and a
# mistyped unit is better refused at the start than found out from the answers.
_Bytes = Annotated[ByteSize, Field(gt=0, json_schema_extra={"unit": "bytes"})]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, json_schema_extra={"unit": "s"})]
_Count = Annotated[int, Field(gt=0, json_schema_extra={"unit": "count"})]


def _readable_keys(path: Path) -> Path:
    read_keys(path)  # a ValueError that says where
    return path


def _readable_warm_up(path: Path) -> Path:
    read_warm_up(path)  # likewise
    return path


def _reachable_by_traces(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("expected a URL that begins with http:// or https://")
    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # one of the packages that it lies in
        installed = False
    if not installed:
        raise ValueError("tracing needs convgrad[otel], which is not installed")
    return url


class Settings(BaseSettings):
    """The settings of one server; immutable once made.

    Bytes may be written with a unit (``256MiB``, ``4GB``); durations are seconds.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_variables(cls, values: Any) -> Any:
        for variable in sorted(os.environ):
            if variable.startswith(_PREFIX) and not _is_known(variable):
                known = [*_variables(), *_OF_THE_CLIENT]
                near = difflib.get_close_matches(variable, known, n=1)
                hint = f", did you mean {near[0]}?" if near else ""
                raise ValueError(f"{variable} is the name of no setting{hint}")
        return values

    http_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. The default is reached from this machine alone.",
    )
    http_port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="Port to listen on; 0 lets the system choose a free one.",
    )
    grpc_port: int = Field(
        default=8001,
        ge=0,
        le=65535,
        description="Port to listen on for gRPC, at the same address; 0 lets the system choose a "
        "free one.",
    )
    management_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None,
        description="Port, at the same address, on which health and metrics are answered in plain "
        "HTTP and without a key, whatever the other ports want; 0 lets the system choose a free "
        "one. For probes and Prometheus, and for nobody outside the platform. Unset means none.",
    )
    service_name: str | None = Field(
        default=None,
        min_length=1,
        description="A name that is asked for as a model, besides the operations', to hear whether "
        "the server is ready: KServe asks by the name of its service. Unset means none.",
    )
    http_workers: _Count = Field(
        default=1,
        description="Processes that serve HTTP, on the same port; all share the devices, the "
        "limits and the metrics. A single one is the process that starts the others.",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="File of the certificate chain (PEM) for TLS on both ports; unset means plain "
        "text. Renewed files are noticed.",
    )
    tls_key: Path | None = Field(
        default=None, description="File of the certificate's private key (PEM), not encrypted."
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="File of the authorities (PEM) of which one must have signed a client's "
        "certificate; unset means that clients need none.",
    )
    backend: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="What computes; auto is the GPU where CuPy finds one that works, else the CPU.",
    )
    kernel_cache: Path | None = Field(
        default=None,
        description="Folder of compiled GPU kernels; unset means one inside the package.",
    )
    warm_up: Annotated[Path, AfterValidator(_readable_warm_up)] | None = Field(
        default=None,
        description="File of requests (JSON, a line each, with their operation) or of a network's "
        "layers whose kernels are compiled, and which are computed once, before the server is "
        "ready; unset means that the first request of a kind waits for its kernels.",
    )
    api_keys: Annotated[Path, AfterValidator(_readable_keys)] | None = Field(
        default=None,
        description="File of API keys, a line each as convgrad key writes them; unset means that "
        "nobody needs one. It is read again when it changes.",
    )
    key_max_inflight: _Count | None = Field(
        default=None,
        description="Requests that one API key may have in flight, over all transports; one more "
        "is refused with 429. A key's own line in the file may say otherwise of this and the next "
        "three limits. Unset means no limit.",
    )
    key_max_inflight_bytes: _Bytes | None = Field(
        default=None,
        description="Bytes that the tensors of one API key's requests in flight may hold "
        "together, inputs and outputs; unset means no limit.",
    )
    key_max_requests_per_s: (
        Annotated[float, Field(gt=0, allow_inf_nan=False, json_schema_extra={"unit": "/s"})] | None
    ) = Field(
        default=None,
        description="Requests that one API key may send in a second; a second's worth may come at "
        "once. Unset means no limit.",
    )
    key_max_flops_per_s: (
        Annotated[float, Field(gt=0, allow_inf_nan=False, json_schema_extra={"unit": "FLOP/s"})]
        | None
    ) = Field(
        default=None,
        description="Floating-point operations that one API key may have computed in a second, on "
        "average; what is over is refused with 429 until the time has passed. Unset means no "
        "limit.",
    )
    otlp_endpoint: Annotated[str, AfterValidator(_reachable_by_traces)] | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector that takes traces over OTLP and HTTP, such "
        "as http://collector:4318/v1/traces; unset means no traces. Needs convgrad[otel].",
    )
    threads: _Count | None = Field(
        default=None,
        description="Threads one problem computes on; unset means one for each core that the "
        "process may use, by its affinity and by the CPU time that its container is granted.",
    )
    compute_slots: _Count | None = Field(
        default=None,
        description="Problems a device computes at the same time; with two or more, the last free "
        "one is kept for small problems. Unset means 2 on the CPU and 4 on a GPU.",
    )
    large_problem_s: _Seconds = Field(
        default=1.0,
        description="A problem estimated to take longer is large, and cannot take the last "
        "free compute slot.",
    )
    codec_threads: _Count = Field(
        default=2, description="Threads that decode requests and encode answers."
    )
    system_shared_memory: bool = Field(
        default=False,
        description="Let clients on this machine name files below /dev/shm that hold their "
        "tensors. Whoever can send requests can then have the server read and write any such "
        "file that it may open.",
    )
    cuda_shared_memory: bool = Field(
        default=False,
        description="Let clients on this machine name memory of its GPUs, by CUDA's IPC handles, "
        "that holds their tensors. Whoever can send requests can then have the server read and "
        "write any allocation of which they know the handle.",
    )
    max_shared_regions: _Count = Field(
        default=256, description="Regions of shared memory that may be registered."
    )
    max_stored_bytes: _Bytes = Field(
        default=ByteSize(_GiB),
        description="Most memory that stored tensors may take; less where memory is short.",
    )
    stored_longest_s: _Seconds = Field(
        default=3600.0,
        description="How long a stored tensor stays since it was last used; X-Time-To-Live may "
        "only shorten it.",
    )
    heartbeat_timeout_s: _Seconds = Field(
        default=10.0,
        description="How long a process of the server may be silent until it is ended and started "
        "again; what a worker computed runs again once.",
    )
    progress_timeout_s: _Seconds = Field(
        default=60.0,
        description="The same of a worker without progress; at least 20 times its estimate.",
    )
    device_timeout_s: _Seconds = Field(
        default=300.0,
        description="How long no device may work until /v2/health/live says no.",
    )
    max_queue: _Count = Field(
        default=64,
        description="Problems that may wait for a compute slot; one more is refused with 429.",
    )
    max_json_bytes: _Bytes = Field(
        default=ByteSize(256 * _MiB), description="Largest JSON body or form accepted."
    )
    max_body_bytes: _Bytes = Field(
        default=ByteSize(4 * _GiB),
        description="Largest binary HTTP body accepted: safetensors, or the Open Inference "
        "Protocol's.",
    )
    grpc_max_message_bytes: Annotated[
        ByteSize, Field(gt=0, lt=2**31, json_schema_extra={"unit": "bytes"})
    ] = Field(
        default=ByteSize(512 * _MiB),
        description="Largest gRPC message accepted, once decompressed; protobuf allows 2 GiB. "
        "Larger tensors have HTTP and shared memory.",
    )
    grpc_message_permits: _Count = Field(
        default=8,
        description="gRPC messages that may take longer than 0.1 s to come in at the same time; "
        "so many times grpc_max_message_bytes is what they may hold of each gRPC process's "
        "memory. Eight times as many streams may be open.",
    )
    grpc_max_unread_bytes: _Bytes = Field(
        default=ByteSize(_GiB),
        description="Most memory that answers over gRPC may hold until they have been sent, in "
        "each process; those of one connection a quarter of it. More wait for max_memory_wait_s "
        "and are refused with UNAVAILABLE then.",
    )
    grpc_connection_age_s: _Seconds = Field(
        default=3600.0,
        description="How long a gRPC connection is used; then its client is told to open another, "
        "and after max_timeout_s it is closed.",
    )
    max_problem_bytes: _Bytes = Field(
        default=ByteSize(16 * _GiB),
        description="Most memory one problem's inputs and outputs may take.",
    )
    max_problem_flops: Annotated[
        float, Field(gt=0, allow_inf_nan=False, json_schema_extra={"unit": "FLOP"})
    ] = Field(default=1e14, description="Most floating-point operations one problem may need.")
    max_verify_flops: Annotated[
        float, Field(gt=0, allow_inf_nan=False, json_schema_extra={"unit": "FLOP"})
    ] = Field(
        default=2e12,
        description="Most floating-point operations that the float64 reference of one POST /verify "
        "may take: four times the operation's own.",
    )
    timing_budget_s: _Seconds = Field(
        default=5.0,
        description="Longest time that one POST /time may take samples, during which its device "
        "computes nothing else.",
    )
    max_timings: _Count = Field(
        default=8, description="Timings that may wait or run at the same time."
    )
    key_max_timings: _Count = Field(default=2, description="The same of one API key.")
    max_output_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1024.0,
        description="Most bytes of outputs for each byte of inputs; 64 MiB are always allowed.",
    )
    max_inflight_bytes: _Bytes | None = Field(
        default=None,
        description="Most memory the tensors of all requests in flight may hold together, inputs "
        "and outputs; unset means half of what the container's limit, or the machine, leaves "
        "beside the server's processes. JSON text has a quarter as much besides, until it is "
        "decoded.",
    )
    max_memory_wait_s: _Seconds = Field(
        default=5.0,
        description="Longest time a request may wait for such memory before it is refused with "
        "429.",
    )
    workspace_bytes: _Bytes = Field(
        default=ByteSize(256 * _MiB),
        description="Most work memory one running problem may use. Less means smaller steps and "
        "the same bits; a problem whose smallest step needs more is refused with 413.",
    )
    max_timeout_s: _Seconds = Field(
        default=300.0,
        description="Longest time a request may take; X-Request-Timeout may only shorten it.",
    )
    body_idle_timeout_s: _Seconds = Field(
        default=20.0,
        description="Longest pause between two parts of a body before it is refused with 408.",
    )
    min_body_bytes_per_s: _Bytes = Field(
        default=ByteSize(32 * _KiB),
        description="Slowest rate at which a body may arrive after the first body_idle_timeout_s.",
    )
    answer_idle_timeout_s: _Seconds = Field(
        default=60.0,
        description="Longest time a client may take none of its answer before it is cut off.",
    )
    header_timeout_s: _Seconds = Field(
        default=15.0,
        description="Longest time from a connection or a request line to the end of the headers.",
    )
    cors_origins: str | None = Field(
        default=None,
        description="Origins, separated by commas, whose scripts a browser lets use this server, "
        "such as https://lab.example; * allows all. Unset means none: no CORS header is sent.",
    )
    max_header_bytes: _Bytes = Field(
        default=ByteSize(64 * _KiB), description="Largest request line and headers together."
    )
    max_connections: _Count = Field(
        default=512, description="Connections open at the same time, to each HTTP process."
    )
    keep_alive_s: _Count = Field(
        default=75,
        json_schema_extra={"unit": "s"},
        description="How long an idle connection is kept.",
    )
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False, json_schema_extra={"unit": "s"})] = (
        Field(
            default=0.0,
            description="How long the server goes on taking requests after SIGINT or SIGTERM while "
            "it says that it is not ready, so that whoever distributes requests stops sending it "
            "any first. Longer than a readiness probe takes to notice.",
        )
    )
    shutdown_grace_s: _Seconds = Field(
        default=30.0,
        description="How long running requests may finish after SIGINT or SIGTERM and drain_s.",
    )
    malloc_tuning: bool = Field(
        default=True,
        description="Let glibc keep large freed blocks for the next body instead of giving "
        "them back to the system (see convgrad_service.server.malloc).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log line written; a line a request at info."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="How log lines are written: as text with fields name=value, or as a JSON "
        "object each.",
    )

    @property
    def key_limits(self) -> KeyLimits:
        """Of every key whose line in the file does not say otherwise."""
        return KeyLimits(
            self.key_max_inflight,
            self.key_max_inflight_bytes,
            self.key_max_requests_per_s,
            self.key_max_flops_per_s,
        )


def _variables() -> list[str]:
    return [f"{_PREFIX}{name.upper()}" for name in Settings.model_fields]


def _is_known(variable: str) -> bool:
    # Upper or lower case, as pydantic-settings takes them.
    name = variable.upper()
    if name in _OF_THE_CLIENT or name in _variables():
        return True
    # What Kubernetes sets in every container for a Service called convgrad or convgrad-something.
    return _OF_A_SERVICE.fullmatch(variable) is not None and (
        "_SERVICE_" in variable or "_TCP" in variable or "://" in os.environ[variable]
    )
