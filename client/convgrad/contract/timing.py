"""Answers of ``/time`` and ``/plan``."""

from __future__ import annotations

from pydantic import Field

from convgrad.contract.verification import Again, Inputs, Said

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


class Device(Said):
    """What computed."""

    backend: str = Field(description="cpu or cuda.")
    name: str
    index: int = 0
    uuid: str = ""
    processors: int = Field(default=0, description="Multiprocessors of a GPU, threads of a CPU.")


class PassedOver(Said):
    """A kernel that the plan did not choose."""

    kernel: str
    reason: str


class PlanReport(Said):
    """What computes the problem, and why nothing else does."""

    kernel: str
    workspace_bytes: int
    pieces: int
    passed_over: tuple[PassedOver, ...] = ()


class ReferenceTime(Said):
    """The time that the device cannot go below: the larger of computing and moving."""

    seconds: float
    limited_by: str = Field(description="flops or bytes.")
    flops_per_s: float = Field(description="The device's peak, of this type.")
    bytes_per_s: float = Field(description="The device's memory bandwidth.")
    overhead_s: float = Field(default=0.0, description="A launch, which is part of it.")
    source: str = Field(description="Where the two rates come from.")


class TensorShape(Said):
    """One tensor of the problem."""

    shape: tuple[int, ...]
    dtype: str


class PlanExplained(Said):
    """The answer to ``GET /plan/<operation>``."""

    operation: str
    layer: str | None = None
    device: Device
    plan: PlanReport
    inputs: dict[str, TensorShape]
    outputs: dict[str, TensorShape]
    flops: int
    valid_flops: int = Field(description="Without the taps that fall wholly in padding.")
    bytes: int = Field(description="Each input read once, each output written once.")
    reference: ReferenceTime
    again: Again | None = None


class TimingReport(Said):
    """The samples of one way of timing."""

    samples: int
    median_s: float
    mean_s: float
    min_s: float
    max_s: float
    p05_s: float
    p25_s: float
    p75_s: float
    p95_s: float
    standard_error: float = Field(description="Of the mean, as a share of it.")
    converged: bool = Field(description="Whether it is below what was asked for.")
    flops_per_s: float = Field(description="Nominal FLOPs over the median.")
    bytes_per_s: float = Field(description="Compulsory bytes over the median.")
    reference_share: float = Field(
        description="The reference time over the median: 1 is as fast as can be."
    )
    samples_s: tuple[float, ...] = Field(description="At most 512 of them, in order.")


class Clocks(Said):
    """The device's clocks, power and temperature at one moment; None where it does not say."""

    sm_hz: float | None = None
    sm_max_hz: float | None = None
    memory_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = Field(default=(), description="What holds the clocks down.")


class Peer(Said):
    """Another library on the same tensors."""

    name: str
    timings: dict[str, TimingReport] = Field(default_factory=dict)
    reason: str | None = Field(default=None, description="Why it was not timed.")


class Candidate(Said):
    """A kernel that could run the problem."""

    kernel: str
    chosen: bool
    predicted_s: float | None = None
    measured_s: float | None = None
    reason: str | None = Field(default=None, description="Why it was passed over.")


class TimedPlan(Said):
    """The answer to ``POST /time/<operation>``.

    ``timings`` are by the way of timing: ``cold`` (caches flushed before each run), ``warm`` (one
    run after another, each timed), ``back_to_back`` (many runs timed together, per run).
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
