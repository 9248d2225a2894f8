"""What `convgrad kernels` compiles for an architecture is what plans launch on its devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import (
    ARCHITECTURES,
    H200,
    SHARED_BYTES,
    architecture_of,
    listed_architecture,
)
from convgrad_service.plans.cuda.program import Instance
from tests.support.kernels.covering import covering

INSTANCES = set(FAMILIES.instances())
CAPABILITIES = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)]


def test_architectures_are_named_as_the_compiler_takes_them() -> None:
    assert architecture_of((8, 6)) == "sm_86"
    assert architecture_of((9, 0)) == "sm_90a"
    # Code of an earlier minor version runs too, but not on a system on a chip.
    assert architecture_of((10, 3)) == "sm_100"
    assert architecture_of((12, 1)) == "sm_120"
    assert architecture_of((8, 7)) == "sm_87"
    # That of another major version never does.
    assert architecture_of((13, 0)) == "sm_130"


def test_one_that_is_not_listed_has_the_instances_of_one_before_it() -> None:
    assert listed_architecture("sm_130") == "sm_120"
    assert listed_architecture("sm_110") == "sm_100"
    assert listed_architecture("sm_95") == "sm_89"
    assert listed_architecture("sm_87") == "sm_86"
    assert [listed_architecture(name) for name in ARCHITECTURES] == list(ARCHITECTURES)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_plans_launch_what_is_compiled_for_their_device(capability: tuple[int, int]) -> None:
    listed = listed_architecture(architecture_of(capability))
    device = replace(
        H200,
        name=listed,
        capability=capability,
        shared_bytes_per_block=SHARED_BYTES[listed],
        multiprocessors=100,
    )
    launched: set[Instance] = set()
    for one in covering(device, FAMILIES, draws=6):
        launched |= one.new
    assert len(launched) > 50
    assert launched <= INSTANCES
    assert not [one.name for one in launched if listed not in one.architectures]
