"""The figures of several engines as those of one, whichever of them come and go. Knows sums, and no Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any

from workers.costs import Prices
from workers.stats import EngineStats

MOMENTARY = ("running", "waiting", "pages_total", "pages_used", "pages_free", "pages_cached")


class Totals:
    """Counters never fall, so those of an engine that is gone or silent count as they last were."""

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}

    def update(self, found: Mapping[str, EngineStats]) -> EngineStats:
        """The total, with what engines of these names say now; one at least was ever heard of."""
        self._last |= found
        total: EngineStats = reduce(
            _sum, (each if name in found else _counters_of(each) for name, each in self._last.items())
        )
        return total


def _counters_of(stats: EngineStats) -> EngineStats:
    remote = stats.remote and replace(stats.remote, connected=True, reason="")  # no complaint
    nothing: Any = dict.fromkeys(MOMENTARY, 0)
    return replace(stats, **nothing, remote=remote, draft_model="", prices=None)


def _sum(left: Any, right: Any) -> Any:
    """Numbers add up, in whatever holds them. What should be so, is if both are; and the first complaint stays."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, Prices):  # they do not add up: one engine's stand for those of all
        return left
    if is_dataclass(left) and not isinstance(left, type):
        return replace(
            left, **{each.name: _sum(getattr(left, each.name), getattr(right, each.name)) for each in fields(left)}
        )
    match left:
        case dict():
            return {key: _sum(left.get(key), right.get(key)) for key in left | right}
        case tuple():
            return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
        case bool():
            return left and right
        case str():
            return left or right
    return left + right
