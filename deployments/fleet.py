"""The verifier replicas as one router sees them: what they say of themselves, and what it has sent them.

Knows names, token ids and counts. Knows no Serve, for which `deployments.routing` stands between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from deployments.affinity import Load, PrefixMap, chains, choose
from workers.sequence import Request

QUIET_S = 5.0  # a replica that has requests of ours and has said nothing for so long is the last choice for others


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself."""

    name: str
    fingerprint: str  # equal for replicas that write the same text
    requests: int = 0  # running and waiting
    max_running: int = 1
    free_tokens: int = 0


@dataclass(eq=False)
class Placement:
    """The place of one attempt, or of a question: what is wished for, and what came of it.

    Goes along with the call and is filled in, in the caller's process, by whoever chooses a replica.
    """

    fingerprint: str = ""  # the replica's, or how that must begin
    only: str = ""  # the replica that is meant, if it is one
    avoid: frozenset[str] = frozenset()  # replicas on which the request has failed
    when_chosen: Callable[[], None] = lambda: None
    fleet: Fleet | None = None
    replica: Report | None = None  # the last one chosen
    accepted: bool = False  # it has taken the request
    leaving: bool = False  # it takes no more, and is to stop
    tried: set[str] = field(default_factory=set)  # chosen before, and could not be reached

    def heard(self) -> None:
        """A word has come from the replica."""
        if self.fleet:
            self.fleet.heard(self)

    def end(self, request: Request, output_ids: Sequence[int]) -> None:
        """The attempt is over; the request has come as far as ``output_ids``."""
        if self.fleet:
            self.fleet.end(self, request, output_ids)

    def __reduce__(self) -> tuple[type[Placement], tuple[()]]:
        return Placement, ()  # replicas have no use for it


@dataclass(eq=False, slots=True)
class _Member:
    report: Report
    placements: set[Placement] = field(default_factory=set)
    heard: float = 0.0  # the last word from it; counts while it has requests
    last_turn: int = 0
    broken: bool = False


class Fleet:
    """Chooses replicas for attempts. All its methods are called on one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._prefixes = PrefixMap(clock=clock)
        self._turns = 0

    def update(self, reports: Iterable[Report]) -> None:
        """These replicas take requests now; others that did are to stop when theirs have ended."""
        members: dict[str, _Member] = {}
        for report in reports:
            members[report.name] = self._members.get(report.name) or _Member(report)
            members[report.name].report = report
        for name in self._members.keys() - members.keys():
            for placement in self._members[name].placements:
                placement.leaving = True
        self._members = members

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def can_place(self, placement: Placement, *, settled: bool) -> bool:
        """Whether there is a replica for the attempt; ``settled``: if need be, one on which it has failed before."""
        fit = self._fit(placement, self._members)
        return any(settled or member.report.name not in placement.avoid for member in fit)

    def choose(self, request: Request, placement: Placement, names: Collection[str]) -> str | None:
        """Fills in where the attempt goes, of the replicas of these names; None: to none of them.

        Called again when the one chosen could not be reached.
        """
        self._leave(placement)
        fit = self._fit(placement, names)
        if not fit:
            return None
        ids = (*request.prompt_ids, *request.output_ids)
        beginnings = chains(ids, request.salt)
        loads = [self._load(member) for member in self._best(fit, placement)]
        name = choose(len(ids), self._prefixes.match(beginnings), loads)
        self._prefixes.remember(beginnings, name)
        self._enter(placement, self._members[name])
        return name

    def heard(self, placement: Placement) -> None:
        if member := self._member(placement):
            member.heard = self._clock()

    def end(self, placement: Placement, request: Request, output_ids: Sequence[int]) -> None:
        """See `Placement.end`. The output's KV is there, too, for a prompt that goes on from it."""
        if member := self._member(placement):
            self._prefixes.remember(chains((*request.prompt_ids, *output_ids), request.salt), member.report.name)
            member.placements.discard(placement)

    def condemn(self, name: str) -> None:
        """The replica's engine is broken: nothing goes there any more."""
        if name in self._members:
            self._members[name].broken = True

    def _fit(self, placement: Placement, names: Iterable[str]) -> list[_Member]:
        found = [self._members[name] for name in names if name in self._members]
        return [m for m in found if not m.broken and m.report.fingerprint.startswith(placement.fingerprint)]

    def _best(self, fit: Sequence[_Member], placement: Placement) -> Sequence[_Member]:
        """Those against which least speaks."""
        now = self._clock()

        def doubts(member: _Member) -> tuple[bool, bool, bool]:
            quiet = bool(member.placements) and now - member.heard > QUIET_S
            return member.report.name in placement.avoid, member.report.name in placement.tried, quiet

        least = min(map(doubts, fit))
        return [member for member in fit if doubts(member) == least]

    def _load(self, member: _Member) -> Load:
        report = member.report
        requests = max(report.requests, len(member.placements))  # reports are late, and count others' requests, too
        return Load(report.name, requests, report.max_running, report.free_tokens, member.last_turn)

    def _enter(self, placement: Placement, member: _Member) -> None:
        self._turns += 1
        member.last_turn = self._turns
        if not member.placements:
            member.heard = self._clock()
        member.placements.add(placement)
        placement.fleet, placement.replica = self, member.report
        placement.when_chosen()

    def _leave(self, placement: Placement) -> None:
        """What was chosen before could not be reached."""
        if placement.replica is not None:
            placement.tried.add(placement.replica.name)
        if member := self._member(placement):
            member.placements.discard(placement)

    def _member(self, placement: Placement) -> _Member | None:
        return self._members.get(placement.replica.name) if placement.replica else None
