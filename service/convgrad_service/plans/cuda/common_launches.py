"""Elimination of common launches: what several fragments compute from one input runs once.

For example, both gradients of a convolution may need grad_output copied to channels last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from convgrad_service.plans.cuda.program import Clear, Fragment, Launch, Step

__all__ = ["hoist_common_launches"]

ANY = ""
"""Placeholder for a workspace's name, so that launches compare equal whatever theirs is called."""


def hoist_common_launches(
    fragments: Sequence[Fragment], inputs: Collection[str]
) -> tuple[tuple[Step, ...], list[Fragment]]:
    """Move launches that fill a workspace from an input, and that several fragments share, out.

    Returns
    -------
    tuple of Step
        The common launches, which must run before all fragments.
    list of Fragment
        The fragments without them, reading the same workspaces.
    """
    fills: dict[Launch, list[str]] = {}
    for fragment in fragments:
        for launch, workspace in _fills_from_input(fragment, inputs):
            fills.setdefault(launch, []).append(workspace)
    common = {launch: names for launch, names in fills.items() if len(names) > 1}
    names = {other: first for first, *others in common.values() for other in others}
    steps = tuple(_renamed(launch, {ANY: first}) for launch, (first, *_) in common.items())
    return steps, [_without(fragment, steps, names) for fragment in fragments]


def _fills_from_input(fragment: Fragment, inputs: Collection[str]) -> Iterator[tuple[Launch, str]]:
    """Yield launches that use one input and one unused workspace, named `ANY`, and its name."""
    workspaces = {item.name for item in fragment.workspace}
    used: set[str] = set()
    for step in fragment.steps:
        buffers = {step.buffer} if isinstance(step, Clear) else set(step.arguments.buffers)
        fresh = (buffers & workspaces) - used
        if isinstance(step, Launch) and len(buffers) == 2 and len(fresh) == 1:
            (workspace,) = fresh
            if not buffers - fresh - set(inputs):
                yield replace(_renamed(step, {workspace: ANY}), overlaps=False), workspace
        used |= buffers


def _without(fragment: Fragment, steps: Sequence[Step], names: Mapping[str, str]) -> Fragment:
    renamed = [
        replace(step, buffer=names.get(step.buffer, step.buffer))
        if isinstance(step, Clear)
        else _renamed(step, names)
        for step in fragment.steps
    ]
    left = [step for step in renamed if _serialized(step) not in steps]
    if left and len(left) < len(renamed):
        # The launch that it overlapped may be gone.
        left[0] = _serialized(left[0])
    return replace(
        fragment,
        steps=tuple(left),
        workspace=tuple(item for item in fragment.workspace if item.name not in names),
    )


def _serialized(step: Step) -> Step:
    """Return the step without overlap of the one before it."""
    return replace(step, overlaps=False) if isinstance(step, Launch) else step


def _renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    return replace(launch, arguments=launch.arguments.renamed(names))
