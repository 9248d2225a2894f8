"""What is too large ever to run, refused before anything is allocated for it.

A body of a hundred bytes can describe a problem of a petabyte; its sizes are plain integers until
it has passed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.errors import ProblemTooLarge
from convgrad_service.engine.memory.problem_size import ProblemSize

__all__ = ["ALWAYS_ALLOWED_BYTES", "Limits"]

ALWAYS_ALLOWED_BYTES = 64 * 2**20
"""Of outputs, however small the inputs are."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest problem a server takes; ``None`` means no limit."""

    problem_bytes: int | None = None
    problem_flops: float | None = None
    output_ratio: float | None = None
    """The bytes of all outputs for each byte of all inputs."""

    def check(self, problem: ProblemSize) -> None:
        """Raise ProblemTooLarge if ``problem`` is over a limit."""
        needed = problem.memory_bytes
        if self.problem_bytes is not None and needed > self.problem_bytes:
            raise ProblemTooLarge(
                f"the inputs and outputs of this {problem.operation} take {_shown(needed)} bytes; "
                f"this server takes at most {self.problem_bytes:,}"
            )
        if self.problem_flops is not None and problem.flops > self.problem_flops:
            raise ProblemTooLarge(
                f"this {problem.operation} needs {_shown(problem.flops)} floating-point "
                f"operations; this server takes at most {self.problem_flops:.3g}"
            )
        self._check_outputs(problem)

    def _check_outputs(self, problem: ProblemSize) -> None:
        if self.output_ratio is None:
            return
        inputs = sum(spec.size_bytes for spec in problem.inputs.values())
        outputs = sum(spec.size_bytes for spec in problem.outputs.values())
        if outputs > max(ALWAYS_ALLOWED_BYTES, self.output_ratio * inputs):
            raise ProblemTooLarge(
                f"the outputs of this {problem.operation} take {_shown(outputs)} bytes, and its "
                f"inputs {_shown(inputs)}; this server gives at most {self.output_ratio:g} bytes "
                f"for each byte that it gets, or {ALWAYS_ALLOWED_BYTES:,}. Is the padding, the "
                "stride or the size of an output what it should be? If so, the setting is "
                "CONVGRAD_MAX_OUTPUT_RATIO"
            )


def _shown(number: int) -> str:
    # Sizes are arbitrary-precision; beyond a float's range only the magnitude is worth showing.
    if number < 10**15:
        return f"{number:,}"
    digits = number.bit_length() * 30103 // 100000
    return f"about 1e{digits}"
