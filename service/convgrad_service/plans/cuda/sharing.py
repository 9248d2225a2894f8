"""What several pieces of work make alike of one input, made once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from convgrad_service.plans.cuda.program import Clear, Fragment, Launch, Step

__all__ = ["taken_out"]

ANY = ""
"""Stands for a workspace, where launches are compared whatever theirs is called."""


def taken_out(
    fragments: Sequence[Fragment], inputs: Collection[str]
) -> tuple[tuple[Step, ...], list[Fragment]]:
    """Launches that fill a workspace from an input as another fragment's does: once, and the
    fragments without them, all with the same workspace.

    Both gradients of a convolution want grad_output with its channels last, for one.
    """
    made: dict[Launch, list[str]] = {}
    for fragment in fragments:
        for launch, workspace in _made_of_inputs(fragment, inputs):
            made.setdefault(launch, []).append(workspace)
    shared = {launch: names for launch, names in made.items() if len(names) > 1}
    names = {other: first for first, *others in shared.values() for other in others}
    steps = tuple(_renamed(launch, {ANY: first}) for launch, (first, *_) in shared.items())
    return steps, [_without(fragment, steps, names) for fragment in fragments]


def _made_of_inputs(fragment: Fragment, inputs: Collection[str]) -> Iterator[tuple[Launch, str]]:
    """Launches that have an input and an untouched workspace and nothing else: with any name for
    the workspace, and its name."""
    workspaces = {item.name for item in fragment.workspace}
    touched: set[str] = set()
    for step in fragment.steps:
        buffers = {step.buffer} if isinstance(step, Clear) else set(step.arguments.buffers)
        fresh = (buffers & workspaces) - touched
        if isinstance(step, Launch) and len(buffers) == 2 and len(fresh) == 1:
            (workspace,) = fresh
            if not buffers - fresh - set(inputs):
                yield replace(_renamed(step, {workspace: ANY}), overlaps=False), workspace
        touched |= buffers


def _without(fragment: Fragment, steps: Sequence[Step], names: Mapping[str, str]) -> Fragment:
    renamed = [
        replace(step, buffer=names.get(step.buffer, step.buffer))
        if isinstance(step, Clear)
        else _renamed(step, names)
        for step in fragment.steps
    ]
    kept = [step for step in renamed if _alone(step) not in steps]
    if kept and len(kept) < len(renamed):
        # What it was to overlap may be gone.
        kept[0] = _alone(kept[0])
    return replace(
        fragment,
        steps=tuple(kept),
        workspace=tuple(item for item in fragment.workspace if item.name not in names),
    )


def _alone(step: Step) -> Step:
    """The same after all of the step before it."""
    return replace(step, overlaps=False) if isinstance(step, Launch) else step


def _renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    return replace(launch, arguments=launch.arguments.renamed(names))
