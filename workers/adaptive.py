"""How far to guess: depth before drafting, the number of nodes after it. Down to not at all.

Quick drafters are asked first; how deep the others shall guess depends on what the quick ones leave to them.

Guesses are bought with seconds and paid back in tokens. A step is worth taking in the form that yields the most tokens
a second, so for each form the expected tokens are weighed against the expected seconds, drafting included. Knows
probabilities, counts and prices. Knows no tensors, no pages and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from drafter.base import CATCH_UP_ROWS, DraftRequest
from drafter.scored import ScoredTree
from verifier.tree import TokenTree
from workers.costs import Costs, Work
from workers.experience import Experience
from workers.glances import SLOWLY, Glances, bought
from workers.lanes import LaneChoice, Pace
from workers.policy import Load

PROBE_SHARE = 0.01  # of the time may go into finding out whether guessing has become worth while
MIN_PROBE_INTERVAL = 2  # steps, for each sequence
# Tokens: to read fewer takes no longer than guesses vary, to read more tells what it costs.
MUCH_TEXT = 64
LEAST_ANSWERED = 0.01
AT_ONCE = 0.01  # of a pass
SLACK = 1.1  # drafts that take so many times as long still keep the bound; or they would be in vain
NO_TIME = 0.5  # of the usual: a drafter that says nothing after so little was not asked


class _Form(NamedTuple):
    """A form that the step could take."""

    tokens: float  # accepted guesses to expect
    rows: int  # of guesses
    drafting: float  # seconds

    def where_these_draft(self, asked: Sequence[_Prospect], depth: int) -> _Form:
        """Besides. What it takes to ask them is not in it, only what they read first."""
        return _Form(
            self.tokens + sum(each.total(depth) for each in asked),
            self.rows + sum(max(depth, each.rows) for each in asked),
            self.drafting + sum(each.entering for each in asked),
        )


class _Prospect(NamedTuple):
    sequence: int
    tokens: Sequence[float]  # to expect of trees of depth 0, 1, …
    rows: int  # of guesses that are there before anybody else is asked
    entering: float  # seconds to read what others have not seen, shared by all steps to come

    def total(self, depth: int) -> float:
        """Tokens."""
        return self.tokens[min(depth, len(self.tokens) - 1)]

    def gain(self, depth: int) -> float:
        """Tokens, over asking nobody else."""
        return self.total(depth) - self.tokens[0]


_Forms = dict[_Form, tuple[Sequence[_Prospect], int]]  # and for each, who draft then, and how deep


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
        self._max_stretch = max_stretch
        self._choice = LaneChoice(max_lanes)
        self._experience = Experience()
        self._glances = Glances()
        self._answered = 1.0  # of the sequences that are asked about, the share that a tree comes back for
        self._saved = 0.0  # seconds that may go into probes
        self._spent = 0.0  # on drafting in this step, in seconds
        self._others: Sequence[_Prospect] | None = None  # in two lanes, those of the other one's last step

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
        forms = [_Form(0.0, 0, self._spent)]
        tokens = 0.0
        for rows, (negative, _, _) in enumerate(ranked, start=1):
            tokens -= negative
            last_of_stair = self.costs.padded(load.work.rows + rows) == load.work.rows + rows or rows == len(ranked)
            if last_of_stair:
                forms.append(_Form(tokens, rows, self._spent))
        counts = dict.fromkeys(trees, 0)
        for _, _, sequence in ranked[: self._best(forms, load).rows]:
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
        self._others = None
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
        self._choice.observe(_together(self.costs.verifying(work), drafting, 2), seconds)

    def _worth_drafting(self, requests: Sequence[DraftRequest], load: Load) -> dict[int, int]:
        """Depth by sequence, of those that shall draft. A chain stands for the tree that is not known yet."""
        prospects = [self._prospect(request) for request in requests]
        self._weigh_lanes(prospects, load)
        forms = self._forms(prospects, load)
        asked, depth = forms[self._best(list(forms), load, SLACK)]
        return {prospect.sequence: depth for prospect in asked}

    def _prospect(self, request: DraftRequest) -> _Prospect:
        known = self._experience.of(request.sequence)
        entering = self.costs.reading(known.unread) / self._experience.length_of(known)
        return _Prospect(request.sequence, known.expected(request.limits.max_draft), known.outlook.rows, entering)

    def _forms(self, prospects: Sequence[_Prospect], load: Load) -> _Forms:
        """What the step could be."""
        token_s = self._token_s(load)
        forms: _Forms = {_Form(0.0, 0, 0.0): ((), 0), _Form(*_quick(prospects), 0.0): ((), 0)}
        for depth in range(1, max((len(prospect.tokens) for prospect in prospects), default=0)):
            ranked = sorted(prospects, key=lambda each: (each.entering - each.gain(depth) * token_s, -each.sequence))
            known = _Form(0.0, 0, 0.0)
            for start, count in pairwise((0, *_counts(len(ranked)))):
                known = known.where_these_draft(ranked[start:count], depth)
                # Where only some questions are answered, guesses cost as much as all the questions.
                asking = self.costs.drafting(depth, count) / max(LEAST_ANSWERED, self._answered)
                for more_tokens, more_rows in (_quick(ranked[count:]), (0.0, 0)):
                    form = _Form(known.tokens + more_tokens, known.rows + more_rows, known.drafting + asking)
                    forms.setdefault(form, (ranked[:count], depth))
        return forms

    def _token_s(self, load: Load) -> float:
        """Seconds that a token takes without guesses; 0 before anything was measured."""
        return self.costs.verifying(load.work) / max(1, load.decoding)

    def _weigh_lanes(self, prospects: Sequence[_Prospect], load: Load) -> None:
        """Compares the best steps that all who decode could take in one lane and in two, as if lanes were alike."""
        decoding, context = load.decoding * load.lanes, load.context
        if not self._choice.open or not self.costs.verifying(Work(1)):
            return
        if load.lanes > 1 and not decoding:  # whoever decodes is in the other lane for once
            return
        others, self._others = self._others, prospects if load.lanes > 1 else None
        if decoding < 2:
            self._choice.leave()
            return
        half = -(-decoding // 2)
        whole = Load(decoding, Work.of_roots(decoding, context), context, 1)
        part = Load(half, Work.of_roots(half, context), context, 2)
        if load.lanes == 1:
            of_whole, of_part = prospects, prospects[::2]
        else:
            of_whole, of_part = [*prospects, *(prospects if others is None else others)], prospects
        one, two = self._best_pace(of_whole, whole), self._best_pace(of_part, part)
        self._choice.weigh(Pace(one.tokens / decoding, one.seconds), Pace(two.tokens / half, 2 * two.seconds))

    def _best_pace(self, prospects: Sequence[_Prospect], load: Load) -> Pace:
        forms = self._allowed(list(self._forms(prospects, load)), load, SLACK)
        return max((self._pace(form, load) for form in forms), key=lambda pace: pace.rate)

    def _probes(self, idle: Sequence[int], load: Load) -> dict[int, int]:
        """Those that shall draft, though it does not pay, to find out whether it has begun to. At depth 1.

        Their price is saved for, step by step, out of what steps take: so it is a small share of the time, however dear
        drafts are, and however many sequences there are or however soon they end.
        """
        waiting = sorted(idle, key=lambda sequence: -self._experience.of(sequence).idle)
        due = [sequence for sequence in waiting if self._experience.of(sequence).idle >= MIN_PROBE_INTERVAL]
        if waiting:
            self._saved += PROBE_SHARE * self.costs.verifying(load.work)
        for count in reversed(_counts(len(due))):
            unread = sum(self._experience.of(sequence).unread for sequence in due[:count])
            price = self.costs.drafting(1, count) + self.costs.reading(unread)
            if price <= self._saved:
                self._saved = 0.0
                return dict.fromkeys(due[:count], 1)
        return {}

    def _best(self, forms: Sequence[_Form], load: Load, slack: float = 1.0) -> _Form:
        """The form with the best yield.

        Prompt chunks are a cost that falls due anyway. So a second is priced at what the decoding sequences alone could
        make of it, and that form is best whose tokens exceed the price of its added seconds by most.
        """
        plain = self.costs.verifying(load.work)
        if plain <= 0.0:  # nothing was measured yet: to guess is to find out
            return forms[-1]
        allowed = self._allowed(forms, load, slack)
        rate = max(self._pace(form, load).rate for form in allowed)

        def surplus(form: _Form) -> float:
            return form.tokens - rate * (self._seconds(form, load) - plain)

        return max(allowed, key=surplus)

    def _allowed(self, forms: Sequence[_Form], load: Load, slack: float) -> Sequence[_Form]:
        """Those that keep the time between two tokens within its bound; in two lanes it is that of a step in each."""
        others = (load.lanes - 1) * load.decoding
        plain = self.costs.verifying(load.work.with_roots(others, load.context))
        longest = self._max_stretch * plain / load.lanes
        within = [form for form in forms if self._seconds(form, load, slack) <= longest]
        return within or forms[:1]

    def _pace(self, form: _Form, load: Load) -> Pace:
        """Of those that decode."""
        work = Work.of_roots(load.decoding, load.context).with_guesses(form.rows, load.context)
        seconds = _together(self.costs.verifying(work), form.drafting, load.lanes)
        return Pace(load.decoding + form.tokens, seconds)

    def _seconds(self, form: _Form, load: Load, slack: float = 1.0) -> float:
        """If drafts take ``slack`` times what is expected."""
        work = load.work.with_guesses(form.rows, load.context)
        return _together(self.costs.verifying(work), slack * form.drafting, load.lanes)


def _quick(prospects: Iterable[_Prospect]) -> tuple[float, int]:
    """Tokens and rows of what is there before anybody else is asked."""
    each = [(prospect.tokens[0], prospect.rows) for prospect in prospects]
    return sum(tokens for tokens, _ in each), sum(rows for _, rows in each)


def _together(verifying: float, drafting: float, lanes: int) -> float:
    """Seconds of a step; in two lanes one goes on beside the other."""
    return verifying + drafting if lanes == 1 else max(verifying, drafting)


def _deepest(requests: Iterable[DraftRequest]) -> int:
    return max((request.limits.max_draft for request in requests), default=0)


def _counts(total: int) -> list[int]:
    """1, 2, 4, … and all."""
    return [*(1 << power for power in range(total.bit_length()) if 1 << power < total), *([total] if total else [])]
