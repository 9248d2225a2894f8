"""``convgrad layers``: lists suites and their layers, or describes a layer, without a server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from convgrad import layers

__all__ = ["run"]

_DESCRIPTION = """\
List the suites; the layers of a suite, each with how often its network computes it; or the sizes,
operations and notations of a layer, named or in any notation that --layer takes elsewhere:

  convgrad layers
  convgrad layers resnet50
  convgrad layers 'Conv2d(64, 64, 3, padding=1) on 32x64x56x56'
"""


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad layers`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="convgrad layers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="SUITE|LAYER", help="default: all suites")
    name = parser.parse_args(argv).name
    if name is None:
        lines = _suites()
    elif name in layers.suite_names():
        lines = _suite(name)
    else:
        lines = _layer(name)
    print("\n".join(lines))
    return 0


def _suites() -> Iterator[str]:
    for name in layers.suite_names():
        count = len(layers.suite(name))
        yield f"{name}: {count} layers"


def _suite(name: str) -> Iterator[str]:
    for each in layers.suite(name):
        times = f"  x{each.networks[name]}" if name in each.networks else ""
        yield f"{each.layer.name}  {layers.text(each.layer)}{times}"


def _layer(words: str) -> Iterator[str]:
    layer = layers.parse(words)
    yield layer.title
    yield f"operations: {', '.join(layers.operations_of(layer))}"
    for notation, text in layers.spellings(layer).items():
        yield f"{notation}: {text}"
