"""How far to guess: depth before drafting, the number of nodes after it. Down to not at all.

Guesses are bought with seconds and paid back in tokens. A step is worth taking in the form that yields the most tokens
a second, so for each form the expected tokens are weighed against the expected seconds, drafting included. Knows
probabilities, counts and prices. Knows no tensors, no pages and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from drafter.base import DraftRequest
from drafter.scored import ScoredTree
from verifier.tree import TokenTree
from workers.costs import Costs
from workers.lanes import LaneChoice

PRIOR_WEIGHT = 16.0  # observations that a new sequence is taken to have seen, of what all sequences see on average
MEMORY = 0.98  # of an observation's weight that is left after the next one: about fifty count
PROBE_SHARE = 0.01  # of the time may go into finding out whether guessing has become worth while
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 8, 512  # steps


class Load(NamedTuple):
    """What a step holds before anybody guesses."""

    decoding: int  # sequences whose root is in it, one row each
    rows: int  # roots and prompt chunks
    keys: int  # that these rows attend to
    context: int  # keys that one more row attends to, on average
    lanes: int = 1  # 2: as many sequences are in another step, which is verified while this one's trees grow


class Policy(Protocol):
    """Decides within the limits that requests have; learns from what it is shown."""

    @property
    def lanes(self) -> int:
        """In how many lanes steps shall be taken from now on."""
        ...

    def limit(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        """Who shall draft, how deep."""
        ...

    def choose(self, trees: Mapping[int, ScoredTree], load: Load) -> dict[int, ScoredTree]:
        """Which of the guesses shall be verified."""
        ...

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        """What was guessed, and what was said."""
        ...

    def forget(self, sequence: int) -> None: ...

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: bool, hidden: bool = False
    ) -> None:
        """``hidden``: it was done before anybody looked, so took less."""
        ...

    def observe_verifying(self, rows: int, keys: int, seconds: float) -> None:
        """Of a step in one lane."""
        ...

    def observe_lap(self, requests: Sequence[DraftRequest], rows: int, keys: int, seconds: float) -> None:
        """Of a step in two lanes: what went by between the other lane's pass and the end of this one."""
        ...


class FixedPolicy:
    """Guesses as far as the limits allow, whatever it costs."""

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes

    def limit(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        return list(requests)

    def choose(self, trees: Mapping[int, ScoredTree], load: Load) -> dict[int, ScoredTree]:
        return dict(trees)

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: bool, hidden: bool = False
    ) -> None:
        pass

    def observe_verifying(self, rows: int, keys: int, seconds: float) -> None:
        pass

    def observe_lap(self, requests: Sequence[DraftRequest], rows: int, keys: int, seconds: float) -> None:
        pass


class Hazards:
    """How often trees hold the next token at each depth, given that they held all before it.

    What is beyond the end of a run was not put to the test and teaches nothing.
    """

    def __init__(self, prior: Hazards | None = None) -> None:
        self._prior = prior
        self._hits: list[float] = []
        self._tries: list[float] = []

    def rate(self, depth: int) -> float:
        """At ``depth`` of 1 and more."""
        prior, weight = (self._prior.rate(depth), PRIOR_WEIGHT) if self._prior else (self._guess(depth), 1.0)
        if depth > len(self._tries):
            return prior
        return (self._hits[depth - 1] + weight * prior) / (self._tries[depth - 1] + weight)

    def _guess(self, depth: int) -> float:
        """Before anything is known of that depth: what holds at the depth before."""
        return self.rate(depth - 1) if depth > 1 else 0.5

    def expected(self, depth: int) -> list[float]:
        """Accepted tokens to expect of trees of depth 0, 1, … ``depth``."""
        tokens, reached = [0.0], 1.0
        for level in range(1, depth + 1):
            reached *= self.rate(level)
            tokens.append(tokens[-1] + reached)
        return tokens

    def learn(self, outcomes: Sequence[bool]) -> None:
        """Whether the tree held the next token, depth by depth."""
        for depth, hit in enumerate(outcomes):
            if depth == len(self._tries):
                self._hits.append(0.0)
                self._tries.append(0.0)
            self._hits[depth] = MEMORY * self._hits[depth] + hit
            self._tries[depth] = MEMORY * self._tries[depth] + 1


@dataclass
class _Known:
    """About one sequence."""

    hazards: Hazards
    idle: int = 0  # steps since it drafted


@dataclass(frozen=True)
class _Form:
    """A form that the step could take."""

    tokens: float  # accepted guesses to expect
    rows: int  # of guesses
    drafting: float  # seconds


_Prospect = tuple[int, Sequence[float]]  # a sequence, and the tokens to expect of trees of depth 0, 1, …


class AdaptivePolicy:
    """Guesses as far as the expected tokens pay for the expected seconds.

    Args:
        max_stretch: how many times longer than without guesses a step may take, so that the time between two tokens of
            any one request is bounded by that, whatever it gains the others.
        max_lanes: 2 if the drafter works elsewhere.
    """

    def __init__(self, costs: Costs, max_stretch: float = 3.0, max_lanes: int = 1) -> None:
        self.costs = costs
        self._max_stretch = max_stretch
        self._choice = LaneChoice(max_lanes)
        self._all = Hazards()
        self._known: dict[int, _Known] = {}
        self._spent = 0.0  # on drafting in this step, in seconds

    @property
    def lanes(self) -> int:
        return self._choice.number

    def limit(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        self._spent = 0.0
        chosen, probe_interval = self._worth_drafting(requests, load), self._probe_interval(load)
        limited: list[DraftRequest] = []
        for request in requests:
            known = self._of(request.sequence)
            known.idle += 1
            depth = chosen.get(request.sequence, 1 if known.idle >= probe_interval else 0)
            if depth:
                known.idle = 0
                limits = replace(request.limits, max_draft=min(depth, request.limits.max_draft))
                limited.append(replace(request, limits=limits))
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
        self._known.pop(sequence, None)

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: bool, hidden: bool = False
    ) -> None:
        depth, batch = _deepest(requests), len(requests)
        if hidden:
            seconds = min(seconds, self.costs.drafting(depth, batch))
        self._spent = seconds
        # A drafter that is not there says nothing, and at once. That is no price; to wait for nothing is one.
        if answered or seconds > self.costs.drafting(depth, batch):
            self.costs.observe_drafting(depth, batch, seconds)

    def observe_verifying(self, rows: int, keys: int, seconds: float) -> None:
        self.costs.observe_verifying(rows, keys, seconds)

    def observe_lap(self, requests: Sequence[DraftRequest], rows: int, keys: int, seconds: float) -> None:
        drafting = self.costs.drafting(_deepest(requests), len(requests))
        self._choice.observe(_together(self.costs.verifying(rows, keys), drafting, 2), seconds)

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
        self._weigh_lanes(prospects, load)
        forms = _forms(prospects, self.costs)
        return forms[self._best(list(forms), load)]

    def _weigh_lanes(self, prospects: Sequence[_Prospect], load: Load) -> None:
        """Compares the best steps that all who decode could take in one lane and in two, as if both were alike."""
        decoding, context = load.decoding * load.lanes, load.context
        if not self._choice.open or not self.costs.verifying(1, 0):
            return
        if decoding < 2:
            self._choice.weigh(1.0, 0.0)
            return
        half = -(-decoding // 2)
        all_of_them, half_of_them = (
            (prospects, prospects[::2]) if load.lanes == 1 else ([*prospects, *prospects], prospects)
        )
        one = self._best_rate(all_of_them, Load(decoding, decoding, decoding * context, context, 1))
        two = self._best_rate(half_of_them, Load(half, half, half * context, context, 2))
        self._choice.weigh(one, two * decoding / (2 * half))

    def _best_rate(self, prospects: Sequence[_Prospect], load: Load) -> float:
        return max(self._rate(form, load) for form in self._allowed(list(_forms(prospects, self.costs)), load))

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

    def _probe_interval(self, load: Load) -> float:
        """Steps after which the price of a shallow draft is small beside what these steps took."""
        plain = self.costs.verifying(load.rows, load.keys)
        price = self.costs.drafting(1, 1)
        interval = price / (PROBE_SHARE * plain) if plain > 0 else 0.0
        return min(MAX_PROBE_INTERVAL, max(MIN_PROBE_INTERVAL, interval))


def _forms(prospects: Sequence[_Prospect], costs: Costs) -> dict[_Form, dict[int, int]]:
    """What a step could be, before its trees are known, and for each form how deep which sequences draft then."""
    forms: dict[_Form, dict[int, int]] = {_Form(0.0, 0, 0.0): {}}
    for depth in range(1, max((len(tokens) for _, tokens in prospects), default=0)):
        gains = sorted(
            ((tokens[min(depth, len(tokens) - 1)], sequence) for sequence, tokens in prospects), reverse=True
        )
        for count in _counts(len(gains)):
            form = _Form(sum(gain for gain, _ in gains[:count]), depth * count, costs.drafting(depth, count))
            forms.setdefault(form, {sequence: depth for _, sequence in gains[:count]})
    return forms


def _together(verifying: float, drafting: float, lanes: int) -> float:
    """Seconds of a step; in two lanes one goes on beside the other."""
    return verifying + drafting if lanes == 1 else max(verifying, drafting)


def _deepest(requests: Iterable[DraftRequest]) -> int:
    return max((request.limits.max_draft for request in requests), default=0)


def _counts(total: int) -> list[int]:
    """1, 2, 4, … and all."""
    return [*(1 << power for power in range(total.bit_length()) if 1 << power < total), *([total] if total else [])]
