"""`bounded`: the complete verification as a pure function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.check.adjoint import AdjointCheck
from convgrad.check.bits import bit_findings, compare_bits
from convgrad.check.bounds import FACTORS, Reference
from convgrad.check.compare import Comparison
from convgrad.check.convolve import Convolver, NumpyConvolver
from convgrad.check.diagnose import findings
from convgrad.check.linearity import LinearityCheck
from convgrad.check.operations import targets
from convgrad.check.references import Span, Target
from convgrad.contract.judged_results import linear_operands
from convgrad.contract.operations import OPERATIONS
from convgrad.contract.verification import (
    Adjointness,
    Finding,
    Inputs,
    Linearity,
    Ours,
    OutputVerification,
    ReferenceReport,
    Verification,
)
from convgrad.errors import InvalidProblem, MalformedRequest

__all__ = ["Judged", "OwnResult", "bounded", "judge"]

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Pair = tuple[Array | Arrays, Array | Arrays]


class OwnResult(NamedTuple):
    """The server's own results."""

    kernel: str
    outputs: Arrays


class Judged(NamedTuple):
    """The caller's results, of a second run, with the first tensor doubled, and for linearity.

    ``linear`` has, by tensor x, the results with x replaced by y and by x + y.
    """

    results: Arrays
    second: Arrays
    doubled: Arrays
    linear: Mapping[str, tuple[Arrays, Arrays]]


def bounded(
    operation: str,
    result: Array | Arrays,
    *,
    factors: str | None = None,
    sums: str = "float32",
    second: Array | Arrays | None = None,
    doubled: Array | Arrays | None = None,
    linear: Mapping[str, Pair] | None = None,
    **arguments: Any,
) -> Verification:
    """Check a result against a float64 reference, element by element, without a server.

    Each element may differ by at most the possible rounding error, see docs/reference/verify.md.
    For inputs of small integers it must be exact.

    Parameters
    ----------
    operation
        Name of the operation, such as ``conv_bwd_data``.
    result
        The output, or a mapping of outputs by name.
    factors
        How factors are rounded before multiplication: ``exact``, ``tf32``, ``tf32_truncated`` or
        ``bfloat16``. By default tf32 with ``precision="high"``, otherwise exact.
    sums
        How sums are rounded: ``float32`` (to nearest) or ``tensor_core`` (truncated).
    second, doubled
        Results of a second run, and of a run with the operation's first tensor doubled.
    linear
        By name of a tensor x, the results with x replaced by y and by x + y, where `linear_pair`
        makes both: the second must be the sum of ``result`` and the first.
    **arguments
        The operation's tensors and parameters, as for the method of `convgrad.Client`.

    Raises
    ------
    MalformedRequest, InvalidProblem
        The operation or an argument is unknown, a tensor is missing, or a result has the wrong
        shape.

    Examples
    --------
    >>> found = convgrad.check.bounded("conv_bwd_data", mine, grad_output=dy, weight=w, padding=1)
    >>> assert found.passed, found.findings
    """
    if operation not in OPERATIONS:
        raise MalformedRequest(
            f"there is no operation {operation[:64]!r}; expected one of {', '.join(OPERATIONS)}"
        )
    known = OPERATIONS[operation]
    fields = known.request.model_fields
    for name in arguments:
        if name not in fields:
            raise MalformedRequest(f"{operation} has no argument {name!r}")
    tensors = {
        name: np.asarray(arguments[name])
        for name in known.tensors
        if arguments.get(name) is not None
    }
    for name in known.required_tensors:
        if name not in tensors:
            raise MalformedRequest(f"{operation} needs {name}, which is missing")
    parameters = {name: each for name, each in arguments.items() if name not in known.tensors}
    first, again, twice = (_by_name(known.outputs, each) for each in (result, second, doubled))
    pairs = {
        name: (_by_name(known.outputs, addend), _by_name(known.outputs, total))
        for name, (addend, total) in (linear or {}).items()
    }
    judged = Judged(first, again, twice, pairs)
    return judge(operation, judged, tensors, parameters, factors=factors, sums=sums)


def _by_name(outputs: Sequence[str], given: Array | Arrays | None) -> Arrays:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {name: np.asarray(each) for name, each in given.items()}
    return {outputs[0]: np.asarray(given)}


def judge(
    operation: str,
    judged: Judged,
    tensors: Arrays,
    parameters: Mapping[str, Any],
    *,
    factors: str | None = None,
    sums: str = "float32",
    convolver: Convolver | None = None,
    ours: OwnResult | None = None,
    inputs: Inputs | None = None,
    threads: int = 1,
    check: Callable[[], None] = lambda: None,
) -> Verification:
    """Verify results as `bounded`, with the options of a server.

    ``convolver`` computes the references, in parts on ``threads`` threads. ``check`` is called
    regularly and may raise to cancel. ``ours`` is checked against the reference too.
    """
    began_s = time.perf_counter()
    if factors is None:
        factors = "tf32" if parameters.get("precision") == "high" else "exact"
    convolver = convolver or NumpyConvolver(check)
    made = targets(operation, tensors, parameters, convolver, factors=FACTORS[factors])
    for name, array in judged.results.items():
        if name not in made:
            raise InvalidProblem(
                f"result_{name} is not computed by this request; it has {', '.join(made)}"
            )
        _check_shape(f"result_{name}", array, made[name])
    if not judged.results:
        raise MalformedRequest(
            f"there is no result to verify; expected result_{next(iter(made))} or another output's"
        )
    reason = _not_exact(tensors.values(), parameters)
    outputs: dict[str, OutputVerification] = {}
    adjointness: dict[str, Adjointness] = {}
    linearity: dict[str, dict[str, Linearity]] = {}
    found: list[Finding] = []
    own_shares: dict[str, float] = {}
    own_passed = True
    for name, result in judged.results.items():
        target = made[name]
        comparison = Comparison(target, result, factors, sums, reason)
        own = None
        if ours is not None and name in ours.outputs:
            own = Comparison(target, ours.outputs[name], factors, sums, reason)
        adjoint = None
        if target.linear is not None or target.adjoint is not None:
            adjoint = AdjointCheck(target, result, factors, sums)
        linear = {
            tensor: LinearityCheck(target, results, factors, sums)
            for tensor, results in _linear_results(operation, name, judged, tensors, target)
        }
        for span, part in _parts(target, threads):
            check()
            for each in (comparison, own, adjoint, *linear.values()):
                if each is not None:
                    each.add(span, part)
        others = (
            None if arrays is None else arrays.get(name)
            for arrays in (None if ours is None else ours.outputs, judged.second, judged.doubled)
        )
        bits = compare_bits(result, *others)
        outputs[name] = comparison.verified(bits)
        found += findings(comparison)
        # A few wrong elements are neither doubled nor added, which says nothing of the kernel.
        few = 0 < comparison.exceeding <= comparison.elements // 100
        found += bit_findings(name, bits, linear=not few)
        if adjoint is not None:
            adjointness[name] = adjoint.outcome(convolver)
            if comparison.passed:  # otherwise it only confirms that elements are wrong
                found += _about_adjoint(name, adjointness[name])
        else:
            adjointness[name] = Adjointness(applies=False, reason=target.why_no_adjoint)
        if linear:
            linearity[name] = {tensor: each.outcome for tensor, each in linear.items()}
            found += [] if few else _about_linearity(name, linearity[name])
        if own is not None:
            own_shares[name] = own.worst.share if own.worst is not None else 0.0
            own_passed = own_passed and own.passed
    return Verification(
        operation=operation,
        passed=not found and all(output.passed for output in outputs.values()),
        findings=tuple(found),
        outputs=outputs,
        adjointness=adjointness,
        linearity=linearity,
        ours=None
        if ours is None
        else Ours(kernel=ours.kernel, worst_share=own_shares, passed=own_passed),
        reference=ReferenceReport(
            device=convolver.name, flops=0, seconds=time.perf_counter() - began_s
        ),
        inputs=inputs or Inputs(dtype=next(iter(tensors.values())).dtype.name),
    )


def _parts(target: Target, threads: int) -> Iterable[tuple[Span, Reference]]:
    """Yield the parts in order, computing later parts while one is used."""
    if threads <= 1 or len(target.spans) == 1:
        for span in target.spans:
            yield span, target.part(span)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="reference") as pool:
        # Not all at once: each takes twice the memory of a part of the result in float64.
        waiting = list(target.spans)
        running = [(span, pool.submit(target.part, span)) for span in waiting[:threads]]
        del waiting[:threads]
        while running:
            span, future = running.pop(0)
            part = future.result()
            if waiting:
                running.append((waiting[0], pool.submit(target.part, waiting.pop(0))))
            yield span, part


def _check_shape(name: str, array: Array, target: Target) -> None:
    try:
        seen = target.see(array)
    except (MalformedRequest, ValueError, IndexError) as refused:
        raise InvalidProblem(
            f"{name} has shape {list(array.shape)}, which does not fit this request: {refused}"
        ) from refused
    if seen.array.shape != target.shape:
        raise InvalidProblem(
            f"{name} has shape {list(array.shape)}, which is {list(seen.array.shape)} as "
            f"({', '.join(seen.axes)}); expected {list(target.shape)}"
        )


def _linear_results(
    operation: str, output: str, judged: Judged, tensors: Arrays, target: Target
) -> Iterable[tuple[str, tuple[Array, Array, Array]]]:
    """Yield, by tensor x, the output for x, for y and for x + y."""
    possible = linear_operands(operation, output, tensors)
    for tensor, pair in judged.linear.items():
        given = [arrays[output] for arrays in pair if output in arrays]
        if not given:
            continue
        if tensor not in possible:
            raise InvalidProblem(
                f"addend_{tensor}_{output}: in this request {output} is not linear in {tensor}; "
                f"it is in {', '.join(possible) or 'none of the tensors'}"
            )
        if len(given) == 1:
            raise MalformedRequest(
                f"addend_{tensor}_{output} and sum_{tensor}_{output} are needed together"
            )
        addend, total = given
        _check_shape(f"addend_{tensor}_{output}", addend, target)
        _check_shape(f"sum_{tensor}_{output}", total, target)
        yield tensor, (judged.results[output], addend, total)


def _not_exact(tensors: Iterable[Array], parameters: Mapping[str, Any]) -> str | None:
    """Return why sums need not be exact, or None if all inputs are integers."""
    for name in ("alpha", "beta"):
        if float(parameters.get(name) or 0.0) % 1:
            return f"{name} is not an integer"
    for name in ("activation0", "activation1"):
        if parameters.get(name) == "silu":
            return f"{name} is silu, which rounds"
    for array in tensors:
        if array.dtype.kind in "iu":
            continue
        with np.errstate(invalid="ignore"):
            flat = array.reshape(-1)
            for start in range(0, flat.size, 2**20):
                some = flat[start : start + 2**20].astype(np.float64)
                if not (np.isfinite(some) & (np.rint(some) == some)).all():
                    return "the inputs are not all integers"
    return None


def _about_linearity(name: str, by_tensor: Mapping[str, Linearity]) -> list[Finding]:
    found = []
    for tensor, linear in by_tensor.items():
        if linear.passed or linear.worst is None:
            continue
        worst = linear.worst
        sentence = (
            f"{name}: it is not linear in {tensor}: f({tensor} + y) differs from f({tensor}) + "
            f"f(y) in {linear.exceeding} elements by more than rounding; at {list(worst.index)} it "
            f"is {worst.value:.9g} and the sum {worst.reference:.9g}, which may differ by "
            f"{worst.bound:.3g}"
        )
        found.append(Finding(code="not-linear", output=name, sentence=sentence))
    return found


def _about_adjoint(name: str, adjoint: Adjointness) -> list[Finding]:
    if adjoint.passed is not False:
        return []
    sentence = (
        f"{name}: <{name}, z> is {adjoint.left!r}, and by the adjoint operation {adjoint.right!r}; "
        f"the bounds let them differ by {adjoint.allowed:.3g}"
    )
    return [Finding(code="not-adjoint", output=name, sentence=sentence)]
