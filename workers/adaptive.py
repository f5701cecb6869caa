"""How far to guess: depth before drafting, the number of nodes after it. Down to not at all.

Quick drafters are asked first; how deep the others shall guess depends on what the quick ones leave to them.

Guesses are bought with seconds and paid back in tokens. A step is worth taking in the form that yields the most tokens
a second, so for each form the expected tokens are weighed against the expected seconds, drafting included. Knows
probabilities, counts and prices. Knows no tensors, no pages and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from drafter.base import CATCH_UP_ROWS, DraftRequest
from drafter.scored import ScoredTree
from verifier.tree import TokenTree
from workers.costs import Costs, Work
from workers.experience import Experience
from workers.forms import Drafters, Form, Prospect, doublings, forms_of
from workers.glances import SLOWLY, Glances, bought
from workers.lanes import LaneChoice, Pace
from workers.policy import Load
from workers.weighing import Weighing, together

PROBE_SHARE = 0.01  # of the time may go into finding out whether guessing has become worth while
MIN_PROBE_INTERVAL = 2  # steps, for each sequence
# Tokens: to read fewer takes no longer than guesses vary, to read more tells what it costs.
MUCH_TEXT = 64
LEAST_ANSWERED = 0.01
AT_ONCE = 0.01  # of a pass
NO_TIME = 0.5  # of the usual: a drafter that says nothing after so little was not asked


class _Lane(NamedTuple):
    decoding: int  # sequences
    prospects: Sequence[Prospect]  # of those of them that may have guesses


class AdaptivePolicy:
    """Guesses as far as the expected tokens pay for the expected seconds.

    Args:
        max_stretch: how many times longer than without guesses a step may be expected to take, so that the time between
            two tokens of any one request is bounded by that, whatever it gains the others. Rare probes may take more,
            or a drafter that was slow once would never be asked again; and so may the reading of a long prompt.
        max_lanes: 2 if the drafter works elsewhere.
    """

    def __init__(self, costs: Costs, max_stretch: float = 3.0, max_lanes: int = 1) -> None:
        self.costs = costs
        self._weighing = Weighing(costs, max_stretch)
        self._choice = LaneChoice(max_lanes)
        self._experience = Experience()
        self._glances = Glances()
        self._answered = 1.0  # of the sequences that are asked about, the share that a tree comes back for
        self._saved = 0.0  # seconds that may go into probes
        self._spent = 0.0  # on drafting in this step, in seconds
        self._other: _Lane | None = None  # of two, as of its last step

    @property
    def lanes(self) -> int:
        return self._choice.number

    def glance(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        for request in requests:
            self._experience.of(request.sequence).look_away()
        step_s = self.costs.verifying(load.work)
        chosen = self._glances.choose([request.sequence for request in requests], self._token_s(load), step_s)
        return [request for request in requests if request.sequence in chosen]

    def observe_glance(self, requests: Sequence[DraftRequest], trees: Mapping[int, ScoredTree], seconds: float) -> None:
        self._glances.observe([request.sequence for request in requests], seconds)
        for request in requests:
            self._experience.of(request.sequence).glance(trees.get(request.sequence))
            if request.sequence not in trees:
                self._glances.learn(request.sequence, 0.0)

    def limit(
        self, requests: Sequence[DraftRequest], load: Load, glance: Mapping[int, ScoredTree]
    ) -> list[DraftRequest]:
        for request in requests:
            self._experience.of(request.sequence).see(len(request.ids))
        depths = self._worth_drafting(requests, load)
        depths |= self._probes([request.sequence for request in requests if request.sequence not in depths], load)
        limited: list[DraftRequest] = []
        room = CATCH_UP_ROWS
        for request in requests:
            known = self._experience.of(request.sequence)
            known.asked = min(depths.get(request.sequence, 0), request.limits.max_draft)
            if known.asked:
                room -= known.read_on(room)
            if known.asked or request.sequence in glance:
                limited.append(replace(request, limits=replace(request.limits, max_draft=known.asked)))
        return limited

    def choose(self, trees: Mapping[int, ScoredTree], load: Load) -> dict[int, ScoredTree]:
        ranked = sorted(
            (-scored.survival[node], rank, sequence)
            for sequence, scored in trees.items()
            for rank, node in enumerate(scored.ranking)
            if node
        )
        forms = [Form(0.0, 0, self._spent)]
        tokens = 0.0
        for rows, (negative, _, _) in enumerate(ranked, start=1):
            tokens -= negative
            last_of_stair = self.costs.padded(load.work.rows + rows) == load.work.rows + rows or rows == len(ranked)
            if last_of_stair:
                forms.append(Form(tokens, rows, self._spent))
        counts = dict.fromkeys(trees, 0)
        for _, _, sequence in ranked[: self._weighing.after_drafts(forms, load).rows]:
            counts[sequence] += 1
        self._spent = 0.0
        chosen = {sequence: trees[sequence].best(count) for sequence, count in counts.items() if count}
        for sequence in trees:
            if (known := self._experience.get(sequence)) and known.quick:
                kept = chosen.get(sequence)
                self._glances.learn(sequence, bought(known.quick.tree, kept) if kept else 0.0)
        return chosen

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        self._experience.learn(sequence, guessed, run)

    def forget(self, sequence: int) -> None:
        self._glances.forget(sequence)
        self._experience.forget(sequence)

    def start_over(self) -> None:
        self._experience.start_over()
        self._glances = Glances()
        self._choice.start_over()
        self._other = None
        self._answered = 1.0
        self.costs.forget_drafting()

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: Set[int], hidden: bool = False
    ) -> None:
        for request in requests:
            if request.sequence not in answered and (known := self._experience.get(request.sequence)):
                known.asked = 0  # what comes of its guesses says nothing about others
        depth, batch, unread = _deepest(requests), len(requests), self._experience.unread(requests)
        drafting, reading = self.costs.drafting(depth, batch), self.costs.reading(unread)
        if hidden and drafting:
            seconds = min(seconds, drafting + reading)
        self._spent = seconds
        # A drafter that is not there says nothing, and at once. That is no price; to wait for nothing is one.
        if not answered and seconds < (NO_TIME * (drafting + reading) or AT_ONCE * self.costs.verifying(Work(1))):
            return
        if unread > MUCH_TEXT:
            if not hidden:
                self.costs.observe_reading(depth, batch, unread, seconds)
            if seconds < drafting and self.costs.knows(batch) and len(answered) == batch:  # with all that was read
                self.costs.observe_drafting(depth, batch, seconds)
            return
        self._answered += SLOWLY * (len(answered) / batch - self._answered)
        if not self.costs.knows(batch):  # so far that was a guess
            self._choice.start_over()
        without = max(seconds - reading, seconds / 2)
        self.costs.observe_drafting(depth, batch, min(without, drafting) if hidden and drafting else without)

    def observe_verifying(self, work: Work, seconds: float) -> None:
        self.costs.observe_verifying(work, seconds)

    def observe_lap(self, requests: Sequence[DraftRequest], work: Work, seconds: float) -> None:
        drafting = self.costs.drafting(_deepest(requests), len(requests)) + self.costs.reading(
            self._experience.unread(requests)
        )
        self._choice.observe(together(self.costs.verifying(work), drafting, 2), seconds)

    def _worth_drafting(self, requests: Sequence[DraftRequest], load: Load) -> dict[int, int]:
        """Depth by sequence, of those that shall draft."""
        prospects = [self._prospect(request) for request in requests]
        self._weigh_lanes(prospects, load)
        forms = self._forms(prospects, load)
        asked, depth = forms[self._weighing.before_drafts(forms, load)]
        return {prospect.sequence: depth for prospect in asked}

    def _prospect(self, request: DraftRequest) -> Prospect:
        known = self._experience.of(request.sequence)
        entering = self.costs.reading(known.unread) / self._experience.length_of(known)
        return Prospect(request.sequence, known.expected(request.limits.max_draft), known.outlook.rows, entering)

    def _forms(self, prospects: Sequence[Prospect], load: Load) -> dict[Form, Drafters]:
        # Where only some questions are answered, guesses cost as much as all the questions.
        answered = max(LEAST_ANSWERED, self._answered)
        return forms_of(
            prospects, self._token_s(load), lambda depth, count: self.costs.drafting(depth, count) / answered
        )

    def _token_s(self, load: Load) -> float:
        """Seconds that a token takes without guesses; 0 before anything was measured."""
        return self.costs.verifying(load.work) / max(1, load.decoding)

    def _weigh_lanes(self, prospects: Sequence[Prospect], load: Load) -> None:
        """Compares the best steps that all who decode could take in one lane and in two."""
        if not self._choice.open or not self.costs.verifying(Work(1)):
            return
        if load.lanes > 1 and not load.decoding:  # whoever decodes is in the other lane for once
            return
        if load.lanes == 1:
            fewer = load.decoding // 2
            lanes = _Lane(load.decoding - fewer, prospects[::2]), _Lane(fewer, prospects[1::2])
        else:
            this = _Lane(load.decoding, prospects)
            lanes = this, self._other or this
        self._other = lanes[0] if load.lanes > 1 else None
        decoding = sum(lane.decoding for lane in lanes)
        if decoding < 2:
            self._choice.leave()
            return
        whole = _Lane(decoding, [prospect for lane in lanes for prospect in lane.prospects])
        one = self._best_pace(whole, load.context, 1)
        two = [self._best_pace(lane, load.context, 2) for lane in lanes]
        tokens, seconds = sum(pace.tokens for pace in two), sum(pace.seconds for pace in two)
        self._choice.weigh(Pace(one.tokens / decoding, one.seconds), Pace(tokens / decoding, seconds))

    def _best_pace(self, lane: _Lane, context: int, lanes: int) -> Pace:
        load = Load(lane.decoding, Work.of_roots(lane.decoding, context), context, lanes)
        return self._weighing.best_pace(self._forms(lane.prospects, load), load)

    def _probes(self, idle: Sequence[int], load: Load) -> dict[int, int]:
        """Those that shall draft, though it does not pay, to find out whether it has begun to. At depth 1.

        Their price is saved for, step by step, out of what steps take: so it is a small share of the time, however dear
        drafts are, and however many sequences there are or however soon they end.
        """
        waiting = sorted(idle, key=lambda sequence: -self._experience.of(sequence).idle)
        due = [sequence for sequence in waiting if self._experience.of(sequence).idle >= MIN_PROBE_INTERVAL]
        if waiting:
            self._saved += PROBE_SHARE * self.costs.verifying(load.work)
        for count in reversed(doublings(len(due))):
            unread = sum(self._experience.of(sequence).unread for sequence in due[:count])
            price = self.costs.drafting(1, count) + self.costs.reading(unread)
            if price <= self._saved:
                self._saved = 0.0
                return dict.fromkeys(due[:count], 1)
        return {}


def _deepest(requests: Iterable[DraftRequest]) -> int:
    return max((request.limits.max_draft for request in requests), default=0)
