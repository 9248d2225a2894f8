"""Digests of results that clients had verified, to compare the next result of the same problem."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

_MAX_SUBMISSIONS = 1024


class BlockDigests(NamedTuple):
    """A tensor's number of elements, and a digest of each of its equal consecutive blocks."""

    elements: int
    digests: tuple[int, ...]


Results = Mapping[str, tuple[int, tuple[int, ...]]]
"""`BlockDigests` by output, as plain tuples."""


class Earlier(NamedTuple):
    """How a result compares with the previous one of the same problem and inputs."""

    equal: bool
    request_id: str
    seconds_ago: float
    first_difference: tuple[int, int] | None


class _Submission(NamedTuple):
    request_id: str
    at_s: float
    results: dict[str, BlockDigests]


class Submissions:
    """The latest results of each owner and problem, at most ``max_submissions``."""

    def __init__(
        self,
        max_submissions: int = _MAX_SUBMISSIONS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_submissions, self._now_s = max_submissions, now_s
        self._submissions: OrderedDict[tuple[str, str], _Submission] = OrderedDict()

    def __len__(self) -> int:
        return len(self._submissions)

    def add(self, owner: str, key: str, request_id: str, results: Results) -> Mapping[str, Earlier]:
        """Store results and compare them with the previous ones, by output.

        ``key`` identifies the problem and its inputs.
        """
        now_s, name = self._now_s(), (owner, key)
        own = {output: BlockDigests(*each) for output, each in results.items()}
        before = self._submissions.pop(name, None)
        known = {} if before is None else before.results
        self._submissions[name] = _Submission(request_id, now_s, {**known, **own})
        if len(self._submissions) > self._max_submissions:
            self._submissions.popitem(last=False)
        if before is None:
            return {}
        return {
            output: _compared(blocks, known[output], before, now_s)
            for output, blocks in own.items()
            if output in known
        }


def _compared(new: BlockDigests, old: BlockDigests, before: _Submission, now_s: float) -> Earlier:
    equal = new == old
    difference = None
    if not equal and len(new.digests) == len(old.digests):
        pairs = enumerate(zip(new.digests, old.digests, strict=True))
        at = next(number for number, (a, b) in pairs if a != b)
        count = len(new.digests)
        difference = at * new.elements // count, (at + 1) * new.elements // count
    return Earlier(equal, before.request_id, now_s - before.at_s, difference)
