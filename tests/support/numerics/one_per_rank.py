"""One small case of each operation and rank."""

from __future__ import annotations

from collections.abc import Iterator

from convgrad.contract import OPERATIONS
from tests.support.numerics.cases import FUSED, Case, conv_cases, pool_cases
from tests.support.numerics.window_cases import OPERATIONS as WINDOW_OPERATIONS
from tests.support.numerics.window_cases import window_cases


def _cases() -> Iterator[Case]:
    """The first case of each operation and rank."""
    for operation in OPERATIONS:
        if operation.startswith("maxpool"):
            found = pool_cases(operation)
        elif operation in WINDOW_OPERATIONS:
            found = window_cases(operation)
        elif operation == "grouped_conv_conv_fwd":
            found = [case for case in FUSED if "silu" not in case.params.values()]
        else:
            found = conv_cases(operation)
        firsts: dict[int, Case] = {}
        for case in found:
            firsts.setdefault(case.ndim, case)
        yield from firsts.values()


ONE_PER_RANK = list(_cases())
