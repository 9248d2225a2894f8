"""Submitted results, compared by digests."""

from __future__ import annotations

from convgrad_service.engine.submissions import Earlier, Submissions


def test_result_is_compared_with_the_previous_one() -> None:
    now = [100.0]
    kept = Submissions(now_s=lambda: now[0])
    results = {"grad_input": (640, tuple(range(64)))}
    assert kept.add("me", "problem", "r1", results) == {}
    now[0] = 103.0
    same = kept.add("me", "problem", "r2", results)
    assert same == {"grad_input": Earlier(True, "r1", 3.0, None)}
    other = {"grad_input": (640, (*range(5), 99, *range(6, 64)))}
    assert kept.add("me", "problem", "r3", other) == {
        "grad_input": Earlier(False, "r2", 0.0, (50, 60))
    }
    assert kept.add("you", "problem", "r4", other) == {}
    assert kept.add("me", "another", "r5", other) == {}


def test_outputs_are_stored_separately() -> None:
    kept = Submissions()
    one, two = {"grad_weight": (4, (1,))}, {"grad_bias": (2, (7,))}
    kept.add("", "p", "r1", one)
    assert kept.add("", "p", "r2", two) == {}
    found = kept.add("", "p", "r3", {**one, **two})
    assert {name: each.equal for name, each in found.items()} == {
        "grad_weight": True,
        "grad_bias": True,
    }


def test_number_of_submissions_is_limited() -> None:
    kept = Submissions(max_submissions=3)
    for number in range(10):
        kept.add("", str(number), "r", {"output": (1, (number,))})
    assert len(kept) == 3
    assert kept.add("", "0", "r", {"output": (1, (0,))}) == {}
    assert kept.add("", "9", "r", {"output": (1, (9,))})["output"].equal
