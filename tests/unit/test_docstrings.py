"""What is public says of itself what a reader needs, and in one order.

The client's methods are held to the same in tests/client/test_calls.py.
"""

from __future__ import annotations

import inspect

import pytest

from convgrad.contract import OPERATIONS
from convgrad_service.problems import PROBLEMS

REQUESTS = {operation.request for operation in OPERATIONS.values()}
ORDER = {
    **dict.fromkeys(REQUESTS, ("Shapes:", "Dtypes:", "Layout:", "Source:")),
    **dict.fromkeys(PROBLEMS.values(), ("Shapes:", "Dtypes:", "Layout:", "Raises", "Source:")),
}


@pytest.mark.parametrize("described", ORDER, ids=lambda described: described.__name__)
def test_docstrings_have_their_parts_in_order(described: type) -> None:
    # Cleaned, for Python 3.13 takes the indentation away and the Pythons before it do not.
    doc = inspect.cleandoc(described.__doc__ or "")
    places = [doc.find(f"\n{part}") for part in ORDER[described]]
    assert -1 not in places, f"missing: {[p for p in ORDER[described] if p not in doc]}"
    assert places == sorted(places)
