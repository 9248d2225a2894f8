"""Answers of ``/time`` and ``/plan``."""

from __future__ import annotations

from pydantic import Field

from convgrad.contract.verification import Again, AnswerModel, Inputs, Real

__all__ = [
    "Candidate",
    "Clocks",
    "Device",
    "PassedOver",
    "Peer",
    "PlanExplained",
    "PlanReport",
    "ReferenceTime",
    "TensorShape",
    "TimedPlan",
    "TimingReport",
]


class Device(AnswerModel):
    """The device that computed."""

    backend: str = Field(description="cpu or cuda.")
    name: str
    index: int = 0
    uuid: str = ""
    processors: int = Field(default=0, description="Multiprocessors of a GPU, threads of a CPU.")


class PassedOver(AnswerModel):
    """A kernel that the plan did not choose."""

    kernel: str
    reason: str


class PlanReport(AnswerModel):
    """The kernel that computes the problem, and why others do not."""

    kernel: str
    workspace_bytes: int
    pieces: int
    passed_over: tuple[PassedOver, ...] = ()


class ReferenceTime(AnswerModel):
    """The roofline's lower bound on the time: the larger of computing and moving the data."""

    seconds: float
    limited_by: str = Field(description="`flops` or `bytes`: which of the two is larger.")
    flops_per_s: float = Field(description="The device's peak rate for this dtype.")
    bytes_per_s: float = Field(description="The device's memory bandwidth.")
    overhead_s: float = Field(default=0.0, description="Time of a launch; part of `seconds`.")
    source: str = Field(description="How the two rates were obtained.")


class TensorShape(AnswerModel):
    """One tensor of the problem."""

    shape: tuple[int, ...]
    dtype: str


class PlanExplained(AnswerModel):
    """The answer to ``GET /plan/<operation>``."""

    operation: str
    layer: str | None = None
    device: Device
    plan: PlanReport
    inputs: dict[str, TensorShape]
    outputs: dict[str, TensorShape]
    flops: int
    valid_flops: int = Field(description="FLOPs without taps in the padding.")
    bytes: int = Field(description="Bytes if each input is read once and each output written once.")
    reference: ReferenceTime
    again: Again | None = None


class TimingReport(AnswerModel):
    """Statistics of one kind of timing."""

    samples: int
    median_s: float
    mean_s: float
    min_s: float
    max_s: float
    p05_s: float
    p25_s: float
    p75_s: float
    p95_s: float
    standard_error: Real = Field(description="Standard error of the mean, relative to the mean.")
    converged: bool = Field(description="Whether `standard_error` reached the requested value.")
    flops_per_s: float = Field(description="Nominal FLOPs over the median.")
    bytes_per_s: float = Field(description="Compulsory bytes over the median.")
    reference_share: float = Field(description="Reference time over the median; 1 is the roofline.")
    samples_s: tuple[float, ...] = Field(description="The samples in order, at most 512 of them.")


class Clocks(AnswerModel):
    """The device's clocks, power and temperature at one moment; None if it does not report them."""

    sm_hz: float | None = None
    sm_max_hz: float | None = None
    memory_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = Field(default=(), description="Reasons for reduced clocks.")


class Peer(AnswerModel):
    """Another library, timed on the same tensors."""

    name: str = Field(description="The library and its version.")
    timings: dict[str, TimingReport] = Field(default_factory=dict)
    reason: str | None = Field(default=None, description="Why the library was not timed.")


class Candidate(AnswerModel):
    """A kernel that could run the problem."""

    kernel: str
    chosen: bool = Field(description="Whether it is the plan's kernel.")
    predicted_s: float | None = Field(default=None, description="Prediction of the cost model.")
    measured_s: float | None = Field(default=None, description="Median with cold caches.")
    reason: str | None = Field(default=None, description="Why it was not timed.")


class TimedPlan(AnswerModel):
    """The answer to ``POST /time/<operation>``.

    ``timings`` has three kinds: ``cold`` (caches flushed before each run), ``warm`` (one run after
    another, each timed) and ``back_to_back`` (many runs timed together; the time of one).
    """

    operation: str
    layer: str | None = None
    device: Device
    plan: PlanReport
    timings: dict[str, TimingReport]
    flops: int
    valid_flops: int
    bytes: int
    reference: ReferenceTime
    clocks_before: Clocks | None = None
    clocks_after: Clocks | None = None
    peers: tuple[Peer, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    inputs: Inputs
    again: Again | None = None
