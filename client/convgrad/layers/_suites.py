"""Layers of known networks by name, from ``suites.txt`` beside this file.

Each line there is a suite, a name, the networks in which the layer occurs with how often it does
(``-`` where there is none), and a benchdnn problem.
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
    """A layer of a suite; ``networks`` says how often it occurs in each network."""

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
    """The suites, and the networks that are suites of their own."""
    names = dict.fromkeys(each.suite for each in _all())
    return (*names, *dict.fromkeys(network for each in _all() for network in each.networks))


def suite(name: str) -> tuple[SuiteLayer, ...]:
    """The layers of a suite or of a network.

    Raises
    ------
    MalformedRequest
        There is none of that name.
    """
    found = tuple(each for each in _all() if name == each.suite or name in each.networks)
    if not found:
        raise MalformedRequest(
            f"there is no suite {name[:64]!r}; expected one of {', '.join(suite_names())}"
        )
    return found


def find_named(name: str) -> Layer | None:
    """The layer of that name, with or without its suite before it."""
    return _by_name().get(name)


def nearest(name: str) -> str | None:
    """The name of a layer that is most like this."""
    return next(iter(difflib.get_close_matches(name[:64], _by_name(), n=1)), None)
