"""Results that were sent to be verified, as digests, so that the next of the same is compared."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Blocks", "Earlier", "Results", "Submissions"]

_MOST = 1024


class Blocks(NamedTuple):
    """One result: its number of elements, and a digest of each of its equal consecutive parts."""

    elements: int
    digests: tuple[int, ...]


Results = Mapping[str, tuple[int, tuple[int, ...]]]
"""`Blocks` by output, as plain tuples."""


class Earlier(NamedTuple):
    """How a result compares with the latest of the same problem and inputs."""

    equal: bool
    request_id: str
    seconds_ago: float
    first_difference: tuple[int, int] | None


class _Kept(NamedTuple):
    request_id: str
    at_s: float
    results: dict[str, Blocks]


class Submissions:
    """The latest of each owner and problem, ``most`` of them in all."""

    def __init__(self, most: int = _MOST, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now_s = most, now_s
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, owner: str, key: str, request_id: str, results: Results) -> Mapping[str, Earlier]:
        """Keep results in the place of earlier ones; what those said, by output.

        ``key`` is the same for the same problem on the same inputs.
        """
        now_s, name = self._now_s(), (owner, key)
        own = {output: Blocks(*each) for output, each in results.items()}
        before = self._kept.pop(name, None)
        known = {} if before is None else before.results
        self._kept[name] = _Kept(request_id, now_s, {**known, **own})
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        if before is None:
            return {}
        return {
            output: _compared(blocks, known[output], before, now_s)
            for output, blocks in own.items()
            if output in known
        }


def _compared(new: Blocks, old: Blocks, before: _Kept, now_s: float) -> Earlier:
    equal = new == old
    difference = None
    if not equal and len(new.digests) == len(old.digests):
        pairs = enumerate(zip(new.digests, old.digests, strict=True))
        at = next(number for number, (a, b) in pairs if a != b)
        count = len(new.digests)
        difference = at * new.elements // count, (at + 1) * new.elements // count
    return Earlier(equal, before.request_id, now_s - before.at_s, difference)
