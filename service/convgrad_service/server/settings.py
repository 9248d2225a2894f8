"""Every setting of the server, in one place: name, default, unit, meaning.

Each field is read from the environment variable ``CONVGRAD_`` + its name in capitals; the command
line of ``convgrad serve`` is generated from the same class. Nothing else reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from convgrad_service.engine.scheduling.quotas import KeyLimits
from convgrad_service.server.setting_values import (
    valid_key_file,
    valid_memory,
    valid_origins,
    valid_otlp_endpoint,
    valid_tuning_table,
    valid_warm_up_file,
)

_PREFIX = "CONVGRAD_"
_CLIENT_VARIABLES = ("CONVGRAD_URL", "CONVGRAD_API_KEY")
_SERVICE_VARIABLE = re.compile(
    r"CONVGRAD_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_TCP(_(PROTO|PORT|ADDR))?)?)"
)

_KiB, _MiB, _GiB = 2**10, 2**20, 2**30
# Positive, because a limit of zero would refuse every request; and what C's integers can hold.
_Bytes = Annotated[ByteSize, Field(gt=0, le=2**62, json_schema_extra={"unit": "bytes"})]
_Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# 23 days: grpcio and poll() count milliseconds in 32 bits.
_LONGEST_S = 2_000_000
_Seconds = Annotated[_Number, Field(le=_LONGEST_S, json_schema_extra={"unit": "s"})]
_WholeSeconds = Annotated[int, Field(gt=0, le=_LONGEST_S, json_schema_extra={"unit": "s"})]
_Pause = Annotated[float, Field(ge=0, le=_LONGEST_S, json_schema_extra={"unit": "s"})]
_Flops = Annotated[_Number, Field(json_schema_extra={"unit": "FLOP"})]
_Count = Annotated[int, Field(gt=0, le=10**9, json_schema_extra={"unit": "count"})]
# All are started at once: a slip of the keyboard must not exhaust the machine.
_Processes = Annotated[int, Field(gt=0, le=256, json_schema_extra={"unit": "count"})]
_Threads = Annotated[int, Field(gt=0, le=1024, json_schema_extra={"unit": "count"})]
_Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """The settings of one server; immutable.

    Sizes in bytes may have a unit (``256MiB``, ``4GB``); durations are seconds.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_and_empty_variables(cls, values: Any) -> Any:
        for variable in sorted(os.environ):
            name = variable.upper()
            if name.startswith(_PREFIX) and not _is_known(variable):
                # Compared without the prefix, which would make any two names similar.
                known = [each[len(_PREFIX) :] for each in (*_variables(), *_CLIENT_VARIABLES)]
                near = difflib.get_close_matches(name[len(_PREFIX) :], known, n=1)
                hint = f", did you mean {_PREFIX}{near[0]}?" if near else ""
                raise ValueError(f"{variable} is not the name of a setting{hint}")
        for name, value in values.items():
            if value == "":  # an empty path would be the current folder
                raise ValueError(f"{_PREFIX}{name.upper()} is empty; unset it for the default")
        return values

    http_host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. The default is reachable from this machine only.",
    )
    http_port: _Port = Field(
        default=8000, description="Port to listen on; 0 lets the system choose a free one."
    )
    grpc_port: _Port = Field(
        default=8001,
        description="Port to listen on for gRPC, on the same address; 0 lets the system choose a "
        "free one.",
    )
    management_port: _Port | None = Field(
        default=None,
        description="Port, on the same address, that serves health and metrics over plain HTTP "
        "without a key, whatever the other ports require; 0 lets the system choose a free one. "
        "For probes and Prometheus; do not expose it. Unset means none.",
    )
    service_name: str | None = Field(
        default=None,
        description="Name of an additional model that is ready when the server is. KServe checks "
        "the readiness of a model named like its service. Unset means none.",
    )
    http_workers: _Processes = Field(
        default=1,
        description="Number of processes that serve HTTP on the same port. They share the devices, "
        "limits and metrics. With 1, HTTP is served by the server's main process.",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="File with the certificate chain (PEM) for TLS on both ports; unset means no "
        "TLS. The file is read again when it changes.",
    )
    tls_key: Path | None = Field(
        default=None, description="File with the certificate's private key (PEM), not encrypted."
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="File with the certificate authorities (PEM), one of which must have signed a "
        "client's certificate; unset means that clients need no certificate.",
    )
    backend: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Backend; auto is the GPU if CuPy finds one that works, otherwise the CPU.",
    )
    kernel_cache: Path | None = Field(
        default=None,
        description="Folder of compiled GPU kernels; unset means one inside the package.",
    )
    tuning: Annotated[Path, AfterValidator(valid_tuning_table)] | None = Field(
        default=None,
        description="Table of GPU kernel configurations, as written by convgrad kernels tune. It "
        "comes before the table of this release, and is skipped on another model of GPU.",
    )
    warm_up: Annotated[Path, AfterValidator(valid_warm_up_file)] | None = Field(
        default=None,
        description="File of requests (JSON, one per line, with their operation) or of network "
        "layers. Their kernels are compiled, and each is computed once, before the server is "
        "ready. Unset means that the first request of a kind waits for its kernels.",
    )
    api_keys: Annotated[Path, AfterValidator(valid_key_file)] | None = Field(
        default=None,
        description="File of API keys, one per line as written by convgrad key. It is read again "
        "when it changes. Unset means that clients need no key.",
    )
    key_max_inflight: _Count | None = Field(
        default=None,
        description="Maximum number of requests in flight per API key, over all transports; more "
        "are refused with 429. A key's line in the file may override this and the next three "
        "limits. Unset means no limit.",
    )
    key_max_inflight_bytes: _Bytes | None = Field(
        default=None,
        description="Maximum total size of the input and output tensors of an API key's requests "
        "in flight; unset means no limit.",
    )
    key_max_requests_per_s: _Number | None = Field(
        default=None,
        json_schema_extra={"unit": "/s"},
        description="Maximum request rate per API key, with bursts of up to one second's worth; "
        "unset means no limit.",
    )
    key_max_flops_per_s: _Number | None = Field(
        default=None,
        json_schema_extra={"unit": "FLOP/s"},
        description="Maximum floating-point operations per second per API key, on average; a key "
        "over its budget is refused with 429 until enough time has passed. Unset means no limit.",
    )
    otlp_endpoint: Annotated[str, AfterValidator(valid_otlp_endpoint)] | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector's OTLP/HTTP endpoint for traces, such as "
        "http://collector:4318/v1/traces; unset means no traces. Needs convgrad[otel].",
    )
    threads: _Threads | None = Field(
        default=None,
        description="Threads per problem on the CPU; unset means one per core that the process may "
        "use according to its affinity and its container's CPU quota.",
    )
    compute_slots: _Threads | None = Field(
        default=None,
        description="Problems that a device computes at the same time; with two or more, the last "
        "free slot is reserved for small problems. Unset means 2 on the CPU and 4 on a GPU.",
    )
    large_problem_s: _Seconds = Field(
        default=1.0,
        description="Problems estimated to take longer than this are large and cannot use the last "
        "free compute slot.",
    )
    codec_threads: _Threads = Field(
        default=2, description="Threads that decode requests and encode responses."
    )
    system_shared_memory: bool = Field(
        default=False,
        description="Allow clients on this machine to pass tensors in files below /dev/shm. Anyone "
        "who can send requests can then have the server read and write any such file that it may "
        "open.",
    )
    cuda_shared_memory: bool = Field(
        default=False,
        description="Allow clients on this machine to pass tensors in GPU memory, by CUDA IPC "
        "handle. Anyone who can send requests can then have the server read and write any "
        "allocation whose handle they know.",
    )
    max_shared_regions: _Count = Field(
        default=256, description="Maximum number of registered shared-memory regions."
    )
    max_stored_bytes: _Bytes = Field(
        default=ByteSize(_GiB),
        description="Maximum memory of stored tensors; less if the machine has little memory.",
    )
    stored_longest_s: _Seconds = Field(
        default=3600.0,
        description="How long a stored tensor is kept after its last use; X-Time-To-Live can only "
        "shorten it.",
    )
    heartbeat_timeout_s: _Seconds = Field(
        default=10.0,
        description="A process of the server that sends no heartbeat for this long is killed and "
        "restarted; the problems of a worker run again, once.",
    )
    progress_timeout_s: _Seconds = Field(
        default=60.0,
        description="Same for a worker without progress; at least 20 times the problem's estimate.",
    )
    device_timeout_s: _Seconds = Field(
        default=300.0,
        description="Time without a working device after which /v2/health/live fails.",
    )
    max_queue: _Count = Field(
        default=64,
        description="Maximum number of problems in the queue; more are refused with 429.",
    )
    max_json_bytes: _Bytes = Field(
        default=ByteSize(256 * _MiB), description="Maximum size of a JSON body or form."
    )
    max_body_bytes: _Bytes = Field(
        default=ByteSize(4 * _GiB),
        description="Maximum size of a binary HTTP body: safetensors, or the Open Inference "
        "Protocol's.",
    )
    grpc_max_message_bytes: _Bytes = Field(
        default=ByteSize(512 * _MiB),
        lt=2**31,
        description="Maximum size of a gRPC message after decompression; protobuf allows 2 GiB. "
        "Send larger tensors over HTTP or in shared memory.",
    )
    grpc_message_permits: _Count = Field(
        default=8,
        description="Maximum number of gRPC messages that take longer than 0.1 s to arrive and may "
        "do so at the same time. Times grpc_max_message_bytes, this bounds their memory in each "
        "gRPC process. Eight times as many streams may be open.",
    )
    grpc_max_unread_bytes: _Bytes = Field(
        default=ByteSize(_GiB),
        description="Maximum memory of gRPC responses not yet sent, in each process; one "
        "connection may use a quarter of it. Further responses wait up to max_memory_wait_s and "
        "then fail with UNAVAILABLE.",
    )
    grpc_connection_age_s: _Seconds = Field(
        default=3600.0,
        description="Age at which a gRPC connection gets a GOAWAY, so that its client opens "
        "another; it is closed after max_timeout_s more.",
    )
    max_problem_bytes: _Bytes = Field(
        default=ByteSize(16 * _GiB),
        description="Maximum memory of one problem's inputs and outputs.",
    )
    max_problem_flops: _Flops = Field(
        default=1e14, description="Maximum floating-point operations of one problem."
    )
    max_verify_flops: _Flops = Field(
        default=2e12,
        description="Maximum floating-point operations of the float64 reference of one POST "
        "/verify; it takes four times as many as the operation itself.",
    )
    timing_budget_s: _Seconds = Field(
        default=5.0,
        description="Maximum time that one POST /time takes samples, with its device to itself.",
    )
    max_timings: _Count = Field(
        default=8, description="Maximum number of timings waiting or running."
    )
    key_max_timings: _Count = Field(default=2, description="Same per API key.")
    max_output_ratio: _Number = Field(
        default=1024.0,
        description="Maximum ratio of output to input bytes; 64 MiB of output are always allowed.",
    )
    memory_bytes: Annotated[_Bytes, AfterValidator(valid_memory)] | None = Field(
        default=None,
        description="Memory that the server may use; unset means its container's or machine's.",
    )
    max_inflight_bytes: _Bytes | None = Field(
        default=None,
        description="Maximum memory of the tensors of all requests in flight; unset means half of "
        "what the server's processes leave of memory_bytes. JSON text may use a quarter as much.",
    )
    max_memory_wait_s: _Seconds = Field(
        default=5.0,
        description="Maximum time that a request waits for such memory before it is refused with "
        "429.",
    )
    workspace_bytes: _Bytes = Field(
        default=ByteSize(256 * _MiB),
        description="Maximum workspace of one running problem. With less, problems are computed in "
        "smaller steps with bitwise identical results; a problem whose smallest step needs more is "
        "refused with 413.",
    )
    max_timeout_s: _Seconds = Field(
        default=300.0,
        description="Maximum time of a request; X-Request-Timeout can only shorten it.",
    )
    body_idle_timeout_s: _Seconds = Field(
        default=20.0,
        description="Maximum pause between two parts of a body before it is refused with 408.",
    )
    min_body_bytes_per_s: _Bytes = Field(
        default=ByteSize(32 * _KiB),
        description="Minimum rate at which a body must arrive after the first body_idle_timeout_s.",
    )
    answer_idle_timeout_s: _Seconds = Field(
        default=60.0,
        description="Time after which a client that reads nothing of its response is disconnected.",
    )
    header_timeout_s: _Seconds = Field(
        default=15.0,
        description="Maximum time from a connection or a request line to the end of the headers.",
    )
    cors_origins: Annotated[str, AfterValidator(valid_origins)] | None = Field(
        default=None,
        description="Comma-separated origins whose scripts may use this server from a browser, "
        "such as https://lab.example; * allows all. Unset means none: no CORS header is sent.",
    )
    max_header_bytes: _Bytes = Field(
        default=ByteSize(64 * _KiB),
        ge=_KiB,  # or health checks would be refused
        le=_GiB,
        description="Maximum size of the request line and headers together.",
    )
    max_connections: _Count = Field(
        default=512,
        description="Maximum number of open connections per HTTP process. For one more, one that "
        "has waited a second for a request is closed, or one of a client that has more with "
        "unfinished headers than the new one's; without any, the new one is refused.",
    )
    keep_alive_s: _WholeSeconds = Field(
        default=75, description="How long an idle connection is kept open."
    )
    drain_s: _Pause = Field(
        default=0.0,
        description="How long the server keeps accepting requests after SIGINT or SIGTERM while it "
        "reports not ready, so that load balancers stop sending requests first. Choose it longer "
        "than a readiness probe takes to notice.",
    )
    shutdown_grace_s: _Seconds = Field(
        default=30.0,
        description="How long running requests may take to finish after drain_s has passed.",
    )
    malloc_tuning: bool = Field(
        default=True,
        description="Make glibc keep large freed blocks for the next body instead of returning "
        "them to the system (see convgrad_service.server.malloc).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum severity of log lines; requests are logged at info."
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Format of log lines: text with fields name=value, or a JSON object per line.",
    )

    @model_validator(mode="after")
    def _refuse_shared_ports(self) -> Self:
        ports = [self.http_port, self.grpc_port, self.management_port]
        taken = [port for port in ports if port]  # 0 and None take no particular port
        if len(set(taken)) < len(taken):
            raise ValueError(f"HTTP, gRPC and management ports are {ports}; expected distinct ones")
        return self

    @property
    def key_limits(self) -> KeyLimits:
        """Limits of keys whose line in the file does not override them."""
        return KeyLimits(
            self.key_max_inflight,
            self.key_max_inflight_bytes,
            self.key_max_requests_per_s,
            self.key_max_flops_per_s,
        )


def log_format_variable() -> str | None:
    """Return the log format in the environment, for errors in other settings."""
    return os.environ.get(f"{_PREFIX}LOG_FORMAT")


def _variables() -> list[str]:
    return [f"{_PREFIX}{name.upper()}" for name in Settings.model_fields]


def _is_known(variable: str) -> bool:
    name = variable.upper()  # pydantic-settings ignores case
    if name in _CLIENT_VARIABLES or name in _variables():
        return True
    # Kubernetes sets these in containers if there is a Service convgrad or convgrad-….
    return _SERVICE_VARIABLE.fullmatch(variable) is not None and (
        "_SERVICE_" in variable or "_TCP" in variable or "://" in os.environ[variable]
    )
