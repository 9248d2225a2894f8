"""Few small problems that between them launch every kernel instance that random ones reach.

Plans are pure, so this needs no GPU: problems are drawn and planned for a device, and one is kept
if it launches an instance that none before it did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.problems import problem_from
from tests.support.kernels.harness import with_layouts
from tests.support.numerics.arrays import DTYPES, request_arrays
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.classes import CLASSES
from tests.support.numerics.strategies import zeros

__all__ = ["Covered", "covering", "covering_quickly", "drawn_layer", "instances_of", "merged"]


@dataclass(frozen=True)
class Covered:
    """A problem, and the instances that it is the first to launch."""

    case: Case
    dtype: str
    layout: str | None
    new: frozenset[Instance]


def instances_of(
    case: Case, dtype: str, layout: str | None, device: CudaDevice, families: Families
) -> Iterator[Instance]:
    """Return what a case launches on a device."""
    params = dict(case.params) if layout is None else {**case.params, "layout": layout}
    arrays = request_arrays(case, zeros(case, DTYPES[dtype]), layout)
    request = validate(OPERATIONS[case.operation].request, {**arrays, **params})
    plan = plan_for(problem_from(case.operation, request), device, families)
    return (step.instance for step in plan.steps if isinstance(step, Launch))


def covering(
    device: CudaDevice,
    families: Families,
    draws: int = 400,
    classes: Collection[str] = tuple(CLASSES),
    dtypes: Collection[str] = tuple(DTYPES),
) -> list[Covered]:
    """The problems kept of ``draws`` for each class of layer and each dtype; always the same."""
    seen: set[Instance] = set()
    kept: list[Covered] = []
    for name in classes:
        for dtype in dtypes:
            rng = Random(f"{name} {dtype}")
            for _ in range(draws):
                case, layout = drawn_layer(name, dtype, rng)
                new = frozenset(instances_of(case, dtype, layout, device, families)) - seen
                if new:
                    seen.update(new)
                    kept.append(Covered(case, dtype, layout, new))
    return kept


def drawn_layer(name: str, dtype: str, rng: Random) -> tuple[Case, str | None]:
    """Return a request of a class of layer, and a layout."""
    case = CLASSES[name](rng)
    layouts = with_layouts(case.ndim, grouped=case.operation in FROM_CONV)
    # Channels last comes up most: it is what fast kernels read.
    layout = layouts[2] if rng.random() < 0.5 else rng.choice(layouts)
    wide = "bwd_weight" in case.operation and "accumulate" not in case.shapes
    if dtype == "float32" and "pool" not in case.operation and rng.random() < 0.5:
        case = case.with_params("high", precision="high")
    if dtype in ("float16", "bfloat16") and wide and rng.random() < 0.5:
        case = case.with_params("wide", weight_dtype="float32")
    return case, layout


def covering_quickly(device: CudaDevice, families: Families, draws: int) -> list[Covered]:
    """`covering`, the classes and dtypes in processes side by side."""
    pairs = [(name, dtype) for name in CLASSES for dtype in DTYPES]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(covering, device, families, draws, (name,), (dtype,))
            for name, dtype in pairs
        ]
        return merged(one for future in waiting for one in future.result())


def merged(found: Iterable[Covered]) -> list[Covered]:
    """Those that launch an instance that none before them does."""
    seen: set[Instance] = set()
    kept: list[Covered] = []
    for one in found:
        if one.new - seen:
            kept.append(one)
            seen |= one.new
    return kept
