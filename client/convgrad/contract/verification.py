"""The answer of ``/verify``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Adjointness",
    "Again",
    "Bits",
    "Earlier",
    "Element",
    "ExactGate",
    "Finding",
    "HeatMap",
    "Histogram",
    "Inputs",
    "NonFinite",
    "Ours",
    "OutputVerification",
    "ReferenceReport",
    "Ulps",
    "Verification",
]


class Said(BaseModel):
    """Part of an answer. What is not finite is written as "NaN", "Infinity" or "-Infinity"; a
    field that a newer server adds is ignored by an older client."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Element(Said):
    """One element of an output."""

    index: tuple[int, ...] = Field(description="Its position in the output, in the layout sent.")
    value: float = Field(description="What the caller computed.")
    reference: float = Field(description="What it is in float64.")
    bound: float = Field(description="By how much rounding may make the two differ.")
    share: float = Field(description="The error as a share of the bound; above 1 it is wrong.")


class Histogram(Said):
    """How many elements lie where: ``counts[i]`` of them above ``edges[i-1]``, up to ``edges[i]``;
    the last of the counts is of what lies above all edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class NonFinite(Said):
    """NaNs and infinities, which must lie where the reference has them."""

    expected: int = Field(description="Elements that are not finite in the reference.")
    found: int = Field(description="Elements that are not finite in the result.")
    mismatches: int = Field(description="Elements where the two disagree.")
    first: Element | None = None


class Ulps(Said):
    """Distance to the rounded reference, in units in the last place of the output's type."""

    max: int = Field(description="The largest, of finite elements.")
    histogram: Histogram


class ExactGate(Said):
    """Equality to the bit, which holds where every sum is exact: of small integers."""

    applies: bool
    reason: str | None = Field(default=None, description="Why it does not apply.")
    passed: bool | None = None
    differing: int | None = None
    first: Element | None = None


class Earlier(Said):
    """The latest earlier submission with the same problem and inputs."""

    equal: bool
    request_id: str
    seconds_ago: float
    first_difference: tuple[int, int] | None = Field(
        default=None,
        description="The flat range of elements in which the first difference lies.",
    )


class Bits(Said):
    """The bits of the result, held against others."""

    digest: str = Field(description="BLAKE2b of the result's bytes, 128 bits, in hexadecimal.")
    equal_to_ours: bool | None = Field(
        default=None, description="None where this server has no kernel for the problem."
    )
    differing_from_ours: int | None = None
    equal_to_second: bool | None = Field(
        default=None, description="None where no result of a second run was sent."
    )
    differing_from_second: int | None = None
    equal_when_doubled: bool | None = Field(
        default=None, description="None where no result for a doubled tensor was sent."
    )
    earlier: Earlier | None = Field(
        default=None, description="None where nobody sent the same before, as far as is remembered."
    )


class HeatMap(Said):
    """The largest share in each cell of a grid over channels (rows) and positions (columns)."""

    axes: tuple[str, str]
    extents: tuple[int, int] = Field(description="Channels and positions that the grid covers.")
    values: tuple[tuple[float, ...], ...]


class OutputVerification(Said):
    """One output, element by element."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    passed: bool
    exceeding: int = Field(description="Elements whose error exceeds the bound.")
    worst: Element | None = Field(default=None, description="None of an empty output.")
    examples: tuple[Element, ...] = Field(
        default=(), description="Up to 8 of the elements that exceed the bound, the first ones."
    )
    shares: Histogram
    ulps: Ulps | None = Field(default=None, description="None of integer outputs.")
    non_finite: NonFinite
    exact: ExactGate
    bits: Bits
    heat_map: HeatMap | None = None


class Adjointness(Said):
    """<result, z> against the same number by the adjoint operation, for a random z, in float64."""

    applies: bool
    reason: str | None = Field(default=None, description="Why it does not apply.")
    left: float | None = None
    right: float | None = None
    allowed: float | None = Field(
        default=None, description="By how much the bounds of all elements let the two differ."
    )
    passed: bool | None = None


class Finding(Said):
    """What is wrong, in words."""

    code: str = Field(
        description="single-element, region, dropped-terms, repeated-terms, permuted-channels, "
        "flipped-kernel, scaled, zeros, non-finite, low-precision, wrong-values, not-exact, "
        "nondeterministic, not-linear or not-adjoint."
    )
    output: str
    sentence: str


class Inputs(Said):
    """What the result was computed from."""

    dtype: str
    seed: int | None = Field(default=None, description="None where every tensor was sent.")
    distribution: str | None = None
    drawn: tuple[str, ...] = Field(default=(), description="The tensors drawn from the seed.")
    digest: str = Field(default="", description="BLAKE2b of all tensors, in hexadecimal.")


class Again(Said):
    """How to ask the same once more; tensors that were sent must be sent again."""

    method: str
    path: str
    fields: dict[str, object] = Field(description="The request's fields but for its tensors.")
    command: str = Field(description="The same as a line of the command line tool.")


class Ours(Said):
    """This server's own result of the same problem."""

    kernel: str
    worst_share: dict[str, float] = Field(description="By output: its largest error, of the bound.")
    passed: bool


class ReferenceReport(Said):
    """How the reference was computed."""

    arithmetic: str = "float64"
    device: str
    flops: int
    seconds: float


class Verification(Said):
    """The answer to ``POST /verify/<operation>``."""

    operation: str
    layer: str | None = Field(default=None, description="The layer as a benchdnn problem.")
    passed: bool
    findings: tuple[Finding, ...] = ()
    outputs: dict[str, OutputVerification]
    adjointness: dict[str, Adjointness] = Field(default_factory=dict)
    ours: Ours | None = None
    reference: ReferenceReport
    inputs: Inputs
    again: Again | None = None
