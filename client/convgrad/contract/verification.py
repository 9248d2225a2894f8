"""The answer of ``/verify``."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

__all__ = [
    "Adjointness",
    "Again",
    "AnswerModel",
    "Bits",
    "Element",
    "ExactGate",
    "Finding",
    "HeatMap",
    "Histogram",
    "Inputs",
    "Linearity",
    "NonFinite",
    "Ours",
    "OutputVerification",
    "Real",
    "ReferenceReport",
    "Ulps",
    "Verification",
]


class AnswerModel(BaseModel):
    """Base of the models in an answer.

    Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity". Unknown fields, which a
    newer server may send, are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    def json_values(self) -> dict[str, Any]:
        """Return what this is in JSON; `model_dump` would leave NaN and infinities in it."""
        values: dict[str, Any] = json.loads(self.model_dump_json())
        return values


_NON_FINITE = {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}
Real = Annotated[
    float, WithJsonSchema({"anyOf": [{"type": "number"}, _NON_FINITE]}, mode="serialization")
]
"""A number of an answer that may be NaN or infinite."""


class Element(AnswerModel):
    """One element of an output."""

    index: tuple[int, ...] = Field(description="Position in the output, in the request's layout.")
    value: Real = Field(description="The caller's value.")
    reference: Real = Field(description="The float64 reference.")
    bound: Real = Field(description="The largest error that rounding can cause.")
    share: Real = Field(description="Error divided by bound; above 1 the element is wrong.")


class Histogram(AnswerModel):
    """A histogram: ``counts[i]`` is the number of elements above ``edges[i-1]`` and at most
    ``edges[i]``; the last count is of the elements above all edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class NonFinite(AnswerModel):
    """NaNs and infinities, which must be where the reference has them."""

    expected: int = Field(description="Number of non-finite elements in the reference.")
    found: int = Field(description="Number of non-finite elements in the result.")
    mismatches: int = Field(description="Number of elements in which the two disagree.")
    first: Element | None = Field(default=None, description="The first such element.")


class Ulps(AnswerModel):
    """Distance to the rounded reference, in units in the last place of the output's dtype."""

    max: int = Field(description="Largest distance of a finite element.")
    histogram: Histogram


class ExactGate(AnswerModel):
    """Bitwise equality with the rounded reference, required if all sums are exact (integers)."""

    applies: bool
    reason: str | None = Field(default=None, description="Why the gate does not apply.")
    passed: bool | None = None
    differing: int | None = Field(default=None, description="Number of elements that differ.")
    first: Element | None = Field(default=None, description="The first element that differs.")


class Bits(AnswerModel):
    """Comparison of the result's bits with other results."""

    digest: str = Field(description="128-bit BLAKE2b of the result's bytes, in hexadecimal.")
    equal_to_ours: bool | None = Field(
        default=None, description="None if this server has no kernel for the problem."
    )
    differing_from_ours: int | None = Field(
        default=None, description="Number of elements that differ from the server's own result."
    )
    equal_to_second: bool | None = Field(
        default=None, description="None if no result of a second run was sent."
    )
    differing_from_second: int | None = Field(
        default=None, description="Number of elements that differ between the two runs."
    )
    equal_when_doubled: bool | None = Field(
        default=None, description="None if no result for a doubled tensor was sent."
    )


class HeatMap(AnswerModel):
    """The largest share in each cell of a grid of channels (rows) by positions (columns)."""

    axes: tuple[str, str] = Field(description="What the rows and columns are.")
    extents: tuple[int, int] = Field(description="Number of channels and of positions covered.")
    values: tuple[tuple[Real, ...], ...]


class OutputVerification(AnswerModel):
    """The verification of one output, element by element."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    passed: bool
    exceeding: int = Field(description="Number of elements whose error exceeds the bound.")
    worst: Element | None = Field(
        default=None, description="The element with the largest share; None if there is none."
    )
    examples: tuple[Element, ...] = Field(
        default=(), description="The first elements that exceed the bound, at most 8."
    )
    shares: Histogram
    ulps: Ulps | None = Field(default=None, description="None for integer outputs.")
    non_finite: NonFinite
    exact: ExactGate
    bits: Bits
    heat_map: HeatMap | None = None


class Adjointness(AnswerModel):
    """<result, z> compared with the same product through the adjoint operation, in float64.

    The elements of z are +1 or -1 at random.
    """

    applies: bool
    reason: str | None = Field(default=None, description="Why the check does not apply.")
    left: Real | None = Field(default=None, description="<result, z>.")
    right: Real | None = Field(default=None, description="The product by the adjoint operation.")
    allowed: Real | None = Field(
        default=None, description="Sum of the bounds of all elements: the allowed difference."
    )
    passed: bool | None = None


class Linearity(AnswerModel):
    """f(x + y) compared with f(x) + f(y), element by element, for one tensor x."""

    passed: bool
    exceeding: int = Field(
        description="Number of elements in which the two differ by more than the three bounds."
    )
    worst: Element | None = Field(
        default=None,
        description="The worst element: `value` is of f(x + y), `reference` of f(x) + f(y), "
        "`bound` the sum of the three results' bounds.",
    )


class Finding(AnswerModel):
    """One fault, as a sentence."""

    code: str = Field(
        description="single-element, region, dropped-terms, repeated-terms, permuted-channels, "
        "flipped-kernel, scaled, zeros, non-finite, low-precision, wrong-values, not-exact, "
        "nondeterministic, not-linear or not-adjoint."
    )
    output: str
    sentence: str


class Inputs(AnswerModel):
    """The tensors that the result was computed from."""

    dtype: str
    seed: int | None = Field(default=None, description="None if all tensors were sent.")
    distribution: str | None = None
    drawn: tuple[str, ...] = Field(
        default=(), description="Names of the tensors drawn from the seed."
    )
    digest: str = Field(default="", description="BLAKE2b of all tensors, in hexadecimal.")


class Again(AnswerModel):
    """How to repeat the request; tensors that were sent must be sent again."""

    method: str
    path: str
    fields: dict[str, object] = Field(description="The request's fields except its tensors.")
    command: str = Field(description="The same as a command line.")


class Ours(AnswerModel):
    """This server's own result for the same problem."""

    kernel: str
    worst_share: dict[str, Real] = Field(
        description="By output, the largest error divided by its bound."
    )
    passed: bool


class ReferenceReport(AnswerModel):
    """How the reference was computed."""

    arithmetic: str = "float64"
    device: str
    flops: int
    seconds: float


class Verification(AnswerModel):
    """The answer to ``POST /verify/<operation>``."""

    operation: str
    layer: str | None = Field(default=None, description="The layer as a benchdnn problem.")
    passed: bool
    findings: tuple[Finding, ...] = ()
    outputs: dict[str, OutputVerification]
    adjointness: dict[str, Adjointness] = Field(default_factory=dict, description="By output.")
    linearity: dict[str, dict[str, Linearity]] = Field(
        default_factory=dict,
        description="By output and tensor; only of tensors for which results were sent.",
    )
    ours: Ours | None = None
    reference: ReferenceReport
    inputs: Inputs
    again: Again | None = None
