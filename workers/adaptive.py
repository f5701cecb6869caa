"""How far to guess: depth before drafting, the number of nodes after it. Down to not at all.

Guesses are bought with seconds and paid back in tokens. A step is worth taking in the form that yields the most tokens
a second, so for each form the expected tokens are weighed against the expected seconds, drafting included. Knows
probabilities, counts and prices. Knows no tensors, no pages and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from drafter.base import CATCH_UP_ROWS, DraftRequest
from drafter.scored import ScoredTree
from verifier.tree import TokenTree
from workers.costs import Costs
from workers.hazards import Hazards
from workers.lanes import LaneChoice
from workers.policy import Load

PROBE_SHARE = 0.01  # of the time may go into finding out whether guessing has become worth while
MIN_PROBE_INTERVAL = 2  # steps, for each sequence
MUCH_TEXT = 64  # tokens; how long it took to read fewer cannot be told from the time that guessing took
LENGTH = 100.0  # tokens of an answer, before any has ended
SLOWLY = 0.1  # of an expectation towards what came last
LEAST_ANSWERED = 0.01
NO_TIME = 0.5  # of the usual: a drafter that says nothing after so little was not asked


@dataclass
class _Known:
    """About one sequence."""

    hazards: Hazards
    prompt: int = 0  # tokens that were there when it began to decode
    length: int = 0  # tokens that are there now
    read: int = 0  # of these, how many its drafters have seen
    reading: int = 0  # of these, how many they saw when it drafted last
    idle: int = 0  # steps since it drafted

    @property
    def unread(self) -> int:
        return self.length - self.read

    def see(self, length: int) -> None:
        """A step has come in which it may draft."""
        self.prompt, self.length, self.idle = self.prompt or length, length, self.idle + 1

    def read_on(self, most: int) -> int:
        """It drafts. Returns how many tokens its drafters read first."""
        self.reading = min(self.unread, most)
        self.read, self.idle = self.read + self.reading, 0
        return self.reading


@dataclass(frozen=True)
class _Form:
    """A form that the step could take."""

    tokens: float  # accepted guesses to expect
    rows: int  # of guesses
    drafting: float  # seconds


_Forms = dict[_Form, dict[int, int]]  # and for each, how deep which sequences draft then
_Prospect = tuple[int, Sequence[float]]  # a sequence, and the tokens to expect of trees of depth 0, 1, …


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
        self._all = Hazards()
        self._known: dict[int, _Known] = {}
        self._length = LENGTH  # tokens of an answer to expect
        self._ended = 0  # answers that this is known from
        self._answered = 1.0  # of the sequences that are asked about, the share that a tree comes back for
        self._saved = 0.0  # seconds that may go into probes
        self._spent = 0.0  # on drafting in this step, in seconds
        self._asked = 0  # sequences about which an answer was to be had

    @property
    def lanes(self) -> int:
        return self._choice.number

    def limit(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        self._spent = 0.0
        for request in requests:
            self._of(request.sequence).see(len(request.ids))
        depths = self._worth_drafting(requests, load)
        depths |= self._probes([request.sequence for request in requests if request.sequence not in depths], load)
        limited: list[DraftRequest] = []
        room = CATCH_UP_ROWS
        for request in requests:
            if depth := depths.get(request.sequence, 0):
                room -= self._of(request.sequence).read_on(room)
                limits = replace(request.limits, max_draft=min(depth, request.limits.max_draft))
                limited.append(replace(request, limits=limits))
        return limited

    def choose(self, trees: Mapping[int, ScoredTree], load: Load) -> dict[int, ScoredTree]:
        if self._asked:
            self._answered += SLOWLY * (len(trees) / self._asked - self._answered)
            self._asked = 0
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
            last_of_stair = self.costs.padded(load.rows + rows) == load.rows + rows or rows == len(ranked)
            if last_of_stair:
                forms.append(_Form(tokens, rows, self._spent))
        kept = dict.fromkeys(trees, 0)
        for _, _, sequence in ranked[: self._best(forms, load).rows]:
            kept[sequence] += 1
        return {sequence: trees[sequence].best(count) for sequence, count in kept.items() if count}

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        node = 0
        outcomes: list[bool] = []
        for _, token in zip(range(max(guessed.depths)), run, strict=False):
            child = guessed.child(node, token)
            outcomes.append(child is not None)
            if child is None:
                break
            node = child
        self._all.learn(outcomes)
        self._of(sequence).hazards.learn(outcomes)

    def forget(self, sequence: int) -> None:
        if known := self._known.pop(sequence, None):
            self._ended += 1
            self._length += max(SLOWLY, 1 / self._ended) * (known.length - known.prompt - self._length)

    def start_over(self) -> None:
        self._all = Hazards()
        self._known.clear()
        self._answered = 1.0
        self.costs.forget_drafting()

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: bool, hidden: bool = False
    ) -> None:
        depth, batch, unread = _deepest(requests), len(requests), self._unread(requests)
        drafting, reading = self.costs.drafting(depth, batch), self.costs.reading(unread)
        if hidden and drafting:
            seconds = min(seconds, drafting + reading)
        self._spent = seconds
        # A drafter that is not there says nothing, and at once. That is no price; to wait for nothing is one.
        if not answered and seconds < NO_TIME * (drafting + reading):
            return
        much = unread > MUCH_TEXT
        self._asked = 0 if much else batch
        if much and not (drafting and reading):  # the first of its kind
            self.costs.observe_reading(unread, seconds - drafting)
            return
        surprise = seconds / (drafting + reading) if drafting else 1.0
        self.costs.observe_drafting(depth, batch, drafting * surprise if drafting else seconds)
        if much:
            self.costs.observe_reading(unread, reading * surprise)

    def observe_verifying(self, rows: int, keys: int, seconds: float) -> None:
        self.costs.observe_verifying(rows, keys, seconds)

    def observe_lap(self, requests: Sequence[DraftRequest], rows: int, keys: int, seconds: float) -> None:
        drafting = self.costs.drafting(_deepest(requests), len(requests)) + self.costs.reading(self._unread(requests))
        self._choice.observe(_together(self.costs.verifying(rows, keys), drafting, 2), seconds)

    def _unread(self, requests: Sequence[DraftRequest]) -> int:
        """Tokens that drafters had to read before they could guess about these."""
        return sum(self._known[request.sequence].reading for request in requests if request.sequence in self._known)

    def _of(self, sequence: int) -> _Known:
        if sequence not in self._known:
            self._known[sequence] = _Known(Hazards(self._all))
        return self._known[sequence]

    def _worth_drafting(self, requests: Sequence[DraftRequest], load: Load) -> dict[int, int]:
        """Depth by sequence, of those that shall draft. A chain stands for the tree that is not known yet."""
        prospects = [
            (request.sequence, self._of(request.sequence).hazards.expected(request.limits.max_draft))
            for request in requests
        ]
        forms = self._forms(prospects, load)
        self._weigh_lanes(prospects, forms, load)
        return forms[self._best(list(forms), load)]

    def _forms(self, prospects: Sequence[_Prospect], load: Load) -> _Forms:
        """What the step could be."""
        entering = {sequence: self._entering(sequence) for sequence, _ in prospects}
        token_s = self.costs.verifying(load.rows, load.keys) / max(1, load.decoding)
        forms: _Forms = {_Form(0.0, 0, 0.0): {}}
        for depth in range(1, max((len(tokens) for _, tokens in prospects), default=0)):
            gains = sorted(
                ((tokens[min(depth, len(tokens) - 1)], sequence) for sequence, tokens in prospects),
                key=lambda each: (each[0] * token_s - entering[each[1]], each),
                reverse=True,
            )
            for count in _counts(len(gains)):
                # Where only some questions are answered, guesses cost as much as all the questions.
                asking = self.costs.drafting(depth, count) / max(LEAST_ANSWERED, self._answered)
                drafting = asking + sum(entering[sequence] for _, sequence in gains[:count])
                form = _Form(sum(gain for gain, _ in gains[:count]), depth * count, drafting)
                forms.setdefault(form, {sequence: depth for _, sequence in gains[:count]})
        return forms

    def _weigh_lanes(self, prospects: Sequence[_Prospect], forms: _Forms, load: Load) -> None:
        """Compares the best steps that all who decode could take in one lane and in two, as if lanes were alike.

        Args:
            forms: that this step could take.
        """
        decoding, context = load.decoding * load.lanes, load.context
        if not self._choice.open or not self.costs.verifying(1, 0):
            return
        if load.lanes > 1 and not decoding:  # whoever decodes is in the other lane for once
            return
        if decoding < 2:
            self._choice.weigh(1.0, 0.0)
            return
        half = -(-decoding // 2)
        whole = Load(decoding, decoding, decoding * context, context, 1)
        part = Load(half, half, half * context, context, 2)
        if load.lanes == 1:
            of_whole, of_part = forms, self._forms(prospects[::2], part)
        else:
            of_whole, of_part = self._forms([*prospects, *prospects], whole), forms
        self._choice.weigh(self._best_rate(of_whole, whole), self._best_rate(of_part, part) * decoding / (2 * half))

    def _best_rate(self, forms: _Forms, load: Load) -> float:
        return max(self._rate(form, load) for form in self._allowed(list(forms), load))

    def _entering(self, sequence: int) -> float:
        """Seconds that it takes to read what drafters have not seen of the sequence, shared by all steps to come.

        It is expected to go on for as long as answers are on average, or for as long as it has been.
        """
        known = self._of(sequence)
        return self.costs.reading(known.unread) / max(1.0, self._length, known.length - known.prompt)

    def _probes(self, idle: Sequence[int], load: Load) -> dict[int, int]:
        """Those that shall draft, though it does not pay, to find out whether it has begun to. At depth 1.

        Their price is saved for, step by step, out of what steps take: so it is a small share of the time, however dear
        drafts are, and however many sequences there are or however soon they end.
        """
        waiting = sorted(idle, key=lambda sequence: -self._of(sequence).idle)
        due = [sequence for sequence in waiting if self._of(sequence).idle >= MIN_PROBE_INTERVAL]
        if waiting:
            self._saved += PROBE_SHARE * self.costs.verifying(load.rows, load.keys)
        for count in reversed(_counts(len(due))):
            unread = sum(self._of(sequence).unread for sequence in due[:count])
            price = self.costs.drafting(1, count) + self.costs.reading(unread)
            if price <= self._saved:
                self._saved = 0.0
                return dict.fromkeys(due[:count], 1)
        return {}

    def _best(self, forms: Sequence[_Form], load: Load) -> _Form:
        """The form with the best yield.

        Prompt chunks are a cost that falls due anyway. So a second is priced at what the decoding sequences alone could
        make of it, and that form is best whose tokens exceed the price of its added seconds by most.
        """
        plain = self.costs.verifying(load.rows, load.keys)
        if plain <= 0.0:  # nothing was measured yet: to guess is to find out
            return forms[-1]
        allowed = self._allowed(forms, load)
        rate = max(self._rate(form, load) for form in allowed)

        def surplus(form: _Form) -> float:
            return form.tokens - rate * (self._seconds(form, load) - plain)

        return max(allowed, key=surplus)

    def _allowed(self, forms: Sequence[_Form], load: Load) -> Sequence[_Form]:
        """Those that keep the time between two tokens within its bound; in two lanes it is that of a step in each."""
        others = (load.lanes - 1) * load.decoding
        plain = self.costs.verifying(load.rows + others, load.keys + others * load.context)
        within = [form for form in forms if load.lanes * self._seconds(form, load) <= self._max_stretch * plain]
        return within or forms[:1]

    def _rate(self, form: _Form, load: Load) -> float:
        """Tokens a second of those that decode."""
        rows = load.decoding + form.rows
        seconds = _together(self.costs.verifying(rows, rows * load.context), form.drafting, load.lanes)
        return (load.decoding + form.tokens) / seconds

    def _seconds(self, form: _Form, load: Load) -> float:
        keys = load.keys + form.rows * load.context
        return _together(self.costs.verifying(load.rows + form.rows, keys), form.drafting, load.lanes)


def _together(verifying: float, drafting: float, lanes: int) -> float:
    """Seconds of a step; in two lanes one goes on beside the other."""
    return verifying + drafting if lanes == 1 else max(verifying, drafting)


def _deepest(requests: Iterable[DraftRequest]) -> int:
    return max((request.limits.max_draft for request in requests), default=0)


def _counts(total: int) -> list[int]:
    """1, 2, 4, … and all."""
    return [*(1 << power for power in range(total.bit_length()) if 1 << power < total), *([total] if total else [])]
