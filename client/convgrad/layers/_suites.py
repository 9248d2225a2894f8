"""Named layers of known networks, from ``suites.txt`` in this directory.

Each line there has a suite, a name, the networks that contain the layer and how often (``-`` if
none), and a benchdnn problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from convgrad.errors import MalformedRequest
from convgrad.layers._benchdnn import parse_benchdnn
from convgrad.layers._layer import Layer

__all__ = ["SuiteLayer", "find_named", "suite", "suite_names"]

_FILE = Path(__file__).with_name("suites.txt")
_NOTHING: Mapping[str, int] = MappingProxyType({})


class SuiteLayer(NamedTuple):
    """A layer of a suite; ``networks`` maps networks to how often the layer occurs."""

    suite: str
    layer: Layer
    networks: Mapping[str, int] = _NOTHING


@cache
def _all() -> tuple[SuiteLayer, ...]:
    found = []
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        group, name, networks, problem = line.split(maxsplit=3)
        counts = (each.rpartition("*") for each in networks.split(",") if networks != "-")
        layer = replace(parse_benchdnn(problem), name=name)
        found.append(SuiteLayer(group, layer, {name: int(n) for name, _, n in counts}))
    return tuple(found)


@cache
def _by_name() -> Mapping[str, Layer]:
    return {name: each.layer for each in _all() for name in _names(each)}


def _names(each: SuiteLayer) -> tuple[str, ...]:
    name = each.layer.name or ""
    return name, f"{each.suite}/{name}"


def suite_names() -> tuple[str, ...]:
    """Return the names of all suites and networks."""
    names = dict.fromkeys(each.suite for each in _all())
    return (*names, *dict.fromkeys(network for each in _all() for network in each.networks))


def suite(name: str) -> tuple[SuiteLayer, ...]:
    """Return the layers of a suite or network.

    Raises
    ------
    MalformedRequest
        No suite or network has that name.
    """
    found = tuple(each for each in _all() if name == each.suite or name in each.networks)
    if not found:
        raise MalformedRequest(
            f"there is no suite {name[:64]!r}; expected one of {', '.join(suite_names())}"
        )
    return found


def find_named(name: str) -> Layer | None:
    """Return the layer with this name, optionally prefixed by its suite, or None."""
    return _by_name().get(name)


def nearest(name: str) -> str | None:
    """Return the most similar name of a layer, or None."""
    return next(iter(difflib.get_close_matches(name[:64], _by_name(), n=1)), None)
