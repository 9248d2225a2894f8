"""`bounded`: the complete verification as a pure function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.check.adjoint import AdjointCheck
from convgrad.check.bounds import FACTORS, Reference
from convgrad.check.compare import Comparison, digest
from convgrad.check.convolve import Convolver, NumpyConvolver
from convgrad.check.diagnose import findings
from convgrad.check.operations import targets
from convgrad.check.references import Span, Target
from convgrad.contract.operations import OPERATIONS
from convgrad.contract.verification import (
    Adjointness,
    Bits,
    Finding,
    Inputs,
    Ours,
    OutputVerification,
    ReferenceReport,
    Verification,
)
from convgrad.errors import InvalidProblem, MalformedRequest

__all__ = ["Judged", "OwnResult", "bounded", "judge"]

Array = NDArray[Any]
Arrays = Mapping[str, Array]


class OwnResult(NamedTuple):
    """The server's own results."""

    kernel: str
    outputs: Arrays


class Judged(NamedTuple):
    """The caller's results, those of a second run, and those with a doubled operand."""

    results: Arrays
    second: Arrays
    doubled: Arrays


def bounded(
    operation: str,
    result: Array | Arrays,
    *,
    factors: str | None = None,
    sums: str = "float32",
    second: Array | Arrays | None = None,
    doubled: Array | Arrays | None = None,
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
    judged = Judged(*(_by_name(known.outputs, each) for each in (result, second, doubled)))
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
        _check_shape(name, array, made[name])
    if not judged.results:
        raise MalformedRequest(
            f"there is no result to verify; expected result_{next(iter(made))} or another output's"
        )
    reason = _not_exact(tensors.values(), parameters)
    outputs: dict[str, OutputVerification] = {}
    adjointness: dict[str, Adjointness] = {}
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
        if target.linear is not None:
            adjoint = AdjointCheck(target, result, factors, sums)
        for span, part in _parts(target, threads):
            check()
            for each in (comparison, own, adjoint):
                if each is not None:
                    each.add(span, part)
        bits = _bits(name, result, judged, ours)
        outputs[name] = comparison.verified(bits)
        found += findings(comparison)
        found += _about_bits(name, bits)
        if adjoint is not None:
            adjointness[name] = adjoint.outcome(convolver)
            if comparison.passed:  # otherwise it only confirms that elements are wrong
                found += _about_adjoint(name, adjointness[name])
        else:
            adjointness[name] = Adjointness(applies=False, reason=target.why_not_linear)
        if own is not None:
            own_shares[name] = own.worst.share if own.worst is not None else 0.0
            own_passed = own_passed and own.passed
    return Verification(
        operation=operation,
        passed=not found and all(output.passed for output in outputs.values()),
        findings=tuple(found),
        outputs=outputs,
        adjointness=adjointness,
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
        seen = target.see(array).array.shape
    except (MalformedRequest, ValueError, IndexError) as refused:
        raise InvalidProblem(
            f"result_{name} has shape {list(array.shape)}, which is none of this request's: "
            f"{refused}"
        ) from refused
    if seen != target.shape:
        raise InvalidProblem(
            f"result_{name} has shape {list(array.shape)}, which is {list(seen)} with the groups "
            f"apart; expected {list(target.shape)}"
        )


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


def _bits(name: str, result: Array, judged: Judged, ours: OwnResult | None) -> Bits:
    own, second, doubled = (
        None if arrays is None else arrays.get(name)
        for arrays in (ours.outputs if ours is not None else None, judged.second, judged.doubled)
    )
    from_ours, from_second = (
        None if other is None else _differing(result, other) for other in (own, second)
    )
    return Bits(
        digest=digest(result),
        equal_to_ours=None if from_ours is None else from_ours == 0,
        differing_from_ours=from_ours,
        equal_to_second=None if from_second is None else from_second == 0,
        differing_from_second=from_second,
        equal_when_doubled=None if doubled is None else _doubles(result, doubled),
    )


def _differing(a: Array, b: Array) -> int:
    """Count the elements whose bits differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return int(max(a.size, b.size))
    left, right = (
        np.ascontiguousarray(each).reshape(-1).view(f"u{each.dtype.itemsize}") for each in (a, b)
    )
    return int(np.count_nonzero(left != right))


def _doubles(result: Array, doubled: Array) -> bool:
    """Return whether every element doubled, except near the ends of the exponent range.

    Doubling may round there.
    """
    if result.shape != doubled.shape:
        return False
    with np.errstate(all="ignore"):
        one, two = result.astype(np.float64), doubled.astype(np.float64)
        tiny = np.abs(one) < 2.0**-10 if result.dtype == np.float16 else np.abs(one) < 2.0**-120
        same = (2.0 * one == two) | tiny | ~np.isfinite(two) | ~np.isfinite(one)
    return bool(same.all())


def _about_bits(name: str, bits: Bits) -> list[Finding]:
    found = []
    if bits.equal_to_second is False:
        sentence = (
            f"{name}: the bits of two runs of the same differ, in {bits.differing_from_second} "
            "elements: the kernel is not deterministic"
        )
        found.append(Finding(code="nondeterministic", output=name, sentence=sentence))
    if bits.equal_when_doubled is False:
        sentence = f"{name}: it does not double with the first tensor: the kernel is not linear"
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
