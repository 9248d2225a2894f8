"""Layers whose fastest configuration was measured on the device at hand.

A table names, for a device model, the family and the configuration of each tuned layer. One ships
with the release (`tests/perf/fit_dense.py` writes it); a user's own, written by ``convgrad kernels
tune``, comes before it. Nothing is timed in a request: the choice depends on the problem, the
device model and the tables alone. Another device, or another number of multiprocessors, takes
nothing from a table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from convgrad_service.backends.cuda.tuning.correction import TABLE
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Family, Selector
from convgrad_service.plans.cuda.program import Instance
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides

__all__ = ["Tunable", "Tuned", "key_of", "read_table", "table_text", "use_table"]

_log = logging.getLogger("convgrad.tuning")
# The user's table of this process.
_own: list[Path] = []


class Tunable(Family[ConvWork], Protocol):
    """A family whose configurations have names."""

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> Family[ConvWork] | None:
        """Return the family with this configuration; None if there is no such one."""
        ...


class Tuned(Selector[ConvWork]):
    """The families of tuned layers, each with the configuration that was the fastest.

    ``own`` ones are those of the user's table alone, which come before every other family.
    """

    name = "tuned"

    def __init__(self, families: Sequence[Tunable], *, own: bool = False) -> None:
        self._families = {family.name: family for family in families}
        self._own = own

    def choice(
        self, work: ConvWork, device: CudaDevice
    ) -> tuple[Chosen | None, list[tuple[str, str]]]:
        """See `Selector.choice`."""
        layers = _layers(device.name, device.multiprocessors, self._own)
        key = key_of(work) if layers else None
        entry = None if key is None else layers.get(key)
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
        return (Tuned(left, own=self._own),) if left else ()

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()


def use_table(path: Path | None) -> None:
    """Take layers from a user's table before the shipped one's, in this process; None takes none.

    Raises
    ------
    ValueError
        As `read_table`.
    """
    if path is not None:
        read_table(path)
    _own[:] = [] if path is None else [path]
    _layers.cache_clear()


def read_table(path: Path) -> dict[str, Any]:
    """Read a table of tuned layers.

    Raises
    ------
    ValueError
        The file cannot be read or is none; the message says what is wrong.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a tuning table: {error}") from None
    layers = table.get("layers") if isinstance(table, dict) else None
    if not isinstance(layers, dict) or not {"device", "multiprocessors"} <= table.keys():
        raise ValueError(f"{path}: expected an object with device, multiprocessors and layers")
    found: dict[str, Any] = table
    for key, entry in layers.items():
        if not (isinstance(entry, list) and [type(part) for part in entry] == [str, str]):
            raise ValueError(f"{path}, {key}: expected a family and a configuration, got {entry!r}")
    return found


def table_text(device: CudaDevice, layers: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a table."""
    table = {
        "device": device.name,
        "multiprocessors": device.multiprocessors,
        "layers": {key: list(entry) for key, entry in sorted(layers.items())},
    }
    return json.dumps(table, indent=1) + "\n"


@cache
def _layers(device: str, multiprocessors: int, own: bool) -> dict[str, tuple[str, str]]:
    """Return the family and the configuration of each tuned layer on this device."""
    found: dict[str, tuple[str, str]] = {}
    for path in _own if own else (TABLE, *_own):
        if path is TABLE and not TABLE.exists():
            continue
        table = read_table(path)
        if (table["device"], table["multiprocessors"]) == (device, multiprocessors):
            found |= {key: (name, config) for key, (name, config) in table["layers"].items()}
        elif path in _own:
            _log.warning(
                "%s is for %s with %s multiprocessors and is not used on %s with %s",
                path,
                table["device"],
                table["multiprocessors"],
                device,
                multiprocessors,
            )
    return found


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
