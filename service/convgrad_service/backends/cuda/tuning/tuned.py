"""Layers whose fastest configuration was measured on the device at hand.

A table that ships with the release names, for a device model, the family and the configuration of
each tuned layer (`tests/perf/fit_dense.py` writes it). Nothing is timed in a request: the choice
depends on the problem, the device model and the table alone. Another device, or another number of
multiprocessors, takes nothing from it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Protocol

from convgrad_service.backends.cuda.tuning.correction import TABLE
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Family, Selector
from convgrad_service.plans.cuda.program import Instance
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides

__all__ = ["Tunable", "Tuned", "key_of"]


class Tunable(Family[ConvWork], Protocol):
    """A family whose configurations have names."""

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> Family[ConvWork] | None:
        """Return the family with this configuration; None if there is no such one."""
        ...


class Tuned(Selector[ConvWork]):
    """The families of tuned layers, each with the configuration that was the fastest."""

    name = "tuned"

    def __init__(self, families: Sequence[Tunable]) -> None:
        self._families = {family.name: family for family in families}

    def choice(
        self, work: ConvWork, device: CudaDevice
    ) -> tuple[Chosen | None, list[tuple[str, str]]]:
        """See `Selector.choice`."""
        key = key_of(work)
        entry = None if key is None else _layers(device.name, device.multiprocessors).get(key)
        if entry is None:
            return None, []
        name, config = entry
        family = self._families.get(name)
        one = None if family is None else family.tuned(config, work, device)
        if one is None:
            return None, [(self.name, f"{name} has no configuration {config}")]
        reason = one.why_not(work, device)
        if reason is not None:
            return None, [(name, reason)]
        return Chosen(name, one.launches(work, device), ()), []

    def without(self, names: Collection[str]) -> tuple[Family[ConvWork], ...]:
        """See `Selector.without`."""
        left = [family for name, family in self._families.items() if name not in names]
        return (Tuned(left),) if left else ()

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()


@cache
def _layers(device: str, multiprocessors: int) -> dict[str, tuple[str, str]]:
    """Return the family and the configuration of each tuned layer on this device."""
    if not TABLE.exists():
        return {}
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if (table["device"], table["multiprocessors"]) != (device, multiprocessors):
        return {}
    return {key: (name, config) for key, (name, config) in table["layers"].items()}


def key_of(work: ConvWork) -> str | None:
    """Return the name of a layer in the table, or None if such work is not tuned.

    Tuned are plain gradients of ungrouped 16-bit convolutions, channels last without gaps.
    """
    if (
        work.groups != 1
        or work.dtype.itemsize != 2
        or work.result_dtype is not work.dtype
        or not work.epilogue_free
        or work.split_k not in (None, 1)
        or work.follows
    ):
        return None
    sides = (
        (work.x, (work.batch, *work.input, work.in_channels), 0),
        (work.y, (work.batch, *work.output, work.out_channels), 0),
        (work.w, (work.out_channels, *work.kernel, work.in_channels), 1),
    )
    if not all(_contiguous(operand, extents, outer) for operand, extents, outer in sides):
        return None
    sizes = (work.input, work.output, work.kernel, work.stride, work.pad, work.dilation)
    text = " ".join("x".join(map(str, size)) for size in sizes)
    return f"{work.direction} {work.batch} {work.in_channels}>{work.out_channels} {text}"


def _contiguous(operand: Operand, extents: tuple[int, ...], outer: int) -> bool:
    """Return whether extents N D H W C, or K T R S C, lie in this order without gaps."""
    strides = (operand.strides[outer], *operand.strides[3:], operand.strides[2])
    return all(
        extent == 1 or stride == wanted
        for extent, stride, wanted in zip(
            extents, strides, contiguous_strides(extents), strict=True
        )
    )
