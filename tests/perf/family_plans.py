"""Which plans would change if a kernel family did not exist, and how long its source is.

A plan uses a family if it is different without it. Needs no GPU.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.sources import KERNELS
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Selector
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from convgrad_service.problems import Problem

__all__ = ["Plans", "excluded", "family_kinds", "lines_of", "name_of", "plans_without"]

Kind = type[Any]
PACKAGE = "convgrad_service.backends.cuda.kernels."


@dataclass(frozen=True)
class Plans:
    """A problem's plan, and the plan without each family that it uses, by the family's name.

    A value is None if no other family computes the problem.
    """

    plan: CudaPlan
    without: Mapping[str, CudaPlan | None]


@cache
def family_kinds() -> dict[str, Kind]:
    """Return the class of every family by its name."""
    found: dict[str, Kind] = {}
    for role in FAMILIES.__slots__:
        for family in _families(getattr(FAMILIES, role)):
            found.setdefault(name_of(type(family)), type(family))
    return found


def name_of(kind: Kind) -> str:
    """Return a family's name; that of its class if objects have names of their own."""
    return kind.name if isinstance(getattr(kind, "name", None), str) else kind.__name__


def _families(value: Any) -> Iterator[Any]:
    """Yield the families in a value: itself, its items, and those that it refers to."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _families(one)
    elif isinstance(value, Mapping):
        yield from _families(list(value.values()))
    elif hasattr(value, "why_not") and hasattr(value, "launches"):
        if not isinstance(value, Selector):
            yield value
        yield from _families(list(getattr(value, "__dict__", {}).values()))


@contextmanager
def excluded(names: Iterable[str]) -> Iterator[None]:
    """Make plans in which none of these families takes any work."""
    with ExitStack() as stack:
        for name in names:
            patch = mock.patch.object(family_kinds()[name], "why_not", return_value="excluded")
            stack.enter_context(patch)
        yield


def plans_without(problem: Problem, device: CudaDevice, together: Iterable[str] = ()) -> Plans:
    """Return the plan of a problem, and those without each family that it uses.

    ``together`` has sets of families to leave out at once, their names joined by ``+``.
    """
    asked: set[str] = set()
    plan = _recording(problem, device, asked)
    without: dict[str, CudaPlan | None] = {}
    for joined in (*sorted(asked), *together):
        names = joined.split("+")
        if not asked.intersection(names):
            continue
        with excluded(names):
            try:
                other = plan_for(problem, device, FAMILIES)
            except UnsupportedProblem:
                without[joined] = None
                continue
        if _launched(other) != _launched(plan):
            without[joined] = other
    return Plans(plan, without)


def _recording(problem: Problem, device: CudaDevice, asked: set[str]) -> CudaPlan:
    """Return the plan; ``asked`` gets the names of the families that were asked for launches."""

    def wrapped(name: str, launches: Any) -> Any:
        def record(*given: Any, **named: Any) -> Any:
            asked.add(name)
            return launches(*given, **named)

        return record

    with ExitStack() as stack:
        for name, kind in family_kinds().items():
            launches = wrapped(name, kind.launches)
            stack.enter_context(mock.patch.object(kind, "launches", launches))
        return plan_for(problem, device, FAMILIES)


def _launched(plan: CudaPlan) -> list[Any]:
    return [
        (step.instance, step.grid, step.cluster) if isinstance(step, Launch) else step
        for step in plan.steps
    ]


def lines_of(name: str) -> int:
    """Return the lines of the files that only this family uses, or these, joined by ``+``."""
    names = name.split("+")
    others = (_files_of(other) for other in family_kinds() if other not in names)
    shared = frozenset[Path]().union(*others)
    own = frozenset[Path]().union(*map(_files_of, names))
    return sum(_line_count(path) for path in own - shared)


@cache
def _files_of(name: str) -> frozenset[Path]:
    """Return the files of a family: its module, its kernels, and what these include or import,
    except for the modules of other families."""
    module = _module_of(family_kinds()[name])
    others = _family_modules() - {module}
    roots = [module]
    seen: set[Path] = set()
    while roots:
        path = roots.pop()
        if path in seen or path in others or not path.is_file():
            continue
        seen.add(path)
        roots += _included(path) if path.suffix != ".py" else _imported(path)
    return frozenset(seen)


def _module_of(kind: Kind) -> Path:
    return KERNELS.joinpath(*kind.__module__.removeprefix(PACKAGE).split(".")).with_suffix(".py")


@cache
def _family_modules() -> frozenset[Path]:
    return frozenset(map(_module_of, family_kinds().values()))


def _imported(path: Path) -> Iterator[Path]:
    """Yield the kernels' modules that a module imports, and the sources that it names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            parts = (node.module or "").removeprefix(PACKAGE).split(".")
            yield KERNELS.joinpath(*parts).with_suffix(".py")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w/]+\.cuh?", str(node.value)):
            yield KERNELS / str(node.value)


def _included(path: Path) -> Iterable[Path]:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r'#include "([\w/.]+)"', text):
        yield KERNELS / name
        yield path.parent / name


@cache
def _line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
