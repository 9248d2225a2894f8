"""What a server takes of the memory that there is."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from convgrad_service.server.composition import memory_budget
from convgrad_service.server.settings import Settings

MiB, GiB = 2**20, 2**30
# Four processes of Python with NumPy and FastAPI.
PROCESSES_BYTES = 300 * MiB


@pytest.mark.parametrize("limit_bytes", [GiB // 2, GiB, 4 * GiB, 24 * GiB, 2048 * GiB])
def test_all_of_it_fits_into_the_limit(limit_bytes: int) -> None:
    budget = memory_budget(Settings(memory_bytes=limit_bytes))
    assert min(budget) > 0
    taken = budget.tensors + budget.texts + budget.stored + 2 * budget.workspace
    assert taken + PROCESSES_BYTES <= limit_bytes
    assert budget.tensors >= limit_bytes // 8


def test_where_there_is_much_limits_are_those_of_the_settings() -> None:
    budget = memory_budget(Settings(memory_bytes=256 * GiB))
    assert budget[1:] == (GiB, GiB, 256 * MiB)
    assert budget.tensors > 127 * GiB


def test_what_is_set_holds_however_little_there_is() -> None:
    sizes = {
        "memory_bytes": GiB,
        "max_inflight_bytes": 7 * GiB,
        "max_json_bytes": 3 * GiB,
        "max_stored_bytes": 5 * GiB,
        "workspace_bytes": 2 * GiB,
    }
    budget = memory_budget(Settings.model_validate(sizes))
    assert budget == (7 * GiB, 3 * GiB, 5 * GiB, 2 * GiB)


def test_too_little_memory_is_refused_with_the_least_amount() -> None:
    with pytest.raises(ValidationError, match=r"at least 512 MiB, of which .* 384, got 1,048,576"):
        Settings(memory_bytes=MiB)
