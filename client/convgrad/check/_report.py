"""Formats a verification for people."""

from __future__ import annotations

from collections.abc import Iterator

from convgrad.contract.verification import OutputVerification, Verification

__all__ = ["report"]

_BAR = 40


def report(found: Verification) -> str:
    """Format a verification in a few lines, findings first."""
    return "\n".join(_lines(found))


def _lines(found: Verification) -> Iterator[str]:
    title = f"{found.operation} {found.layer or ''}".strip()
    yield f"{title}: {'PASSED' if found.passed else 'FAILED'}"
    for finding in found.findings:
        yield f"  {finding.code}: {finding.sentence}"
    for name, output in found.outputs.items():
        yield from _of_output(name, output)
        adjoint = found.adjointness.get(name)
        if adjoint is not None and adjoint.applies:
            verdict = "holds" if adjoint.passed else "does not hold"
            yield f"    adjointness {verdict}: {adjoint.left:.9g} and {adjoint.right:.9g}"
        for tensor, linear in found.linearity.get(name, {}).items():
            verdict = "holds" if linear.passed else f"fails in {linear.exceeding} elements"
            yield f"    linearity in {tensor} {verdict}"
    if found.ours is not None:
        shares = ", ".join(f"{name} {share:.3g}" for name, share in found.ours.worst_share.items())
        yield f"  the server's own kernel {found.ours.kernel}: worst error / bound {shares}"
    yield (
        f"  reference: {found.reference.arithmetic} on {found.reference.device}, "
        f"{found.reference.seconds:.3f} s"
    )
    if found.again is not None:
        yield f"  repeat with: {found.again.command}"


def _of_output(name: str, output: OutputVerification) -> Iterator[str]:
    shape = "x".join(map(str, output.shape))
    yield (
        f"  {name} ({output.dtype} {shape}): {output.exceeding} of {output.elements} elements "
        "exceed the bound"
    )
    if output.worst is not None:
        worst = output.worst
        yield (
            f"    worst error {worst.share:.3g} of the bound, at {list(worst.index)}: "
            f"{worst.value:.9g}, reference {worst.reference:.17g}, bound {worst.bound:.3g}"
        )
    if output.ulps is not None:
        yield f"    at most {output.ulps.max} units in the last place from the rounded reference"
    exact = output.exact
    if exact.applies:
        verdict = "all bits equal" if exact.passed else f"{exact.differing} elements differ"
        yield f"    exact gate: {verdict}"
    else:
        yield f"    exact gate does not apply: {exact.reason}"
    bits = output.bits
    if bits.equal_to_ours is not None:
        count = bits.differing_from_ours
        same = "identical to" if bits.equal_to_ours else f"{count} elements differ from"
        yield f"    bits: {same} the server's own result"
    yield from _histogram(output)


def _histogram(output: OutputVerification) -> Iterator[str]:
    """Format the histogram of error shares, in powers of two."""
    edges, counts = output.shares.edges, output.shares.counts
    largest = max(counts, default=0)
    if not largest:
        return
    for number, count in enumerate(counts):
        if count:
            label = f"<= {edges[number]:.3g}" if number < len(edges) else f"> {edges[-1]:.3g}"
            bar = "#" * max(1, round(_BAR * count / largest))
            yield f"    {label:>12} {count:>12} {bar}"
