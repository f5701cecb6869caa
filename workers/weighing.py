"""Which form a step should take: the one that yields the most tokens a second. Or one that might.

A row count that is held to be dear is not taken, and so its price would never be found to be wrong. Now and then a form
is taken, on trial, that would be the best one if its row count were as cheap as it may be for all that is known. Knows
forms and prices. Knows no sequences and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from workers.costs import Costs, Work
from workers.forms import Drafters, Form
from workers.lanes import Pace
from workers.policy import Load

SLACK = 1.1  # drafts that take so many times as long still keep the bound; or they would be in vain
TRIAL_SHARE = 0.005  # of the time may be lost by trials,
MOST_SAVED = 4  # passes without guesses; so much may be lost at first, and saved later
TRIAL_INTERVAL = 4  # steps, at least
CHEAP = 0.1  # of the step's time: where drafts differ by more, they decide, and not what rows take
WORTH = 0.02  # of the step's time: what is tried may gain no less


class Weighing:
    """
    Args:
        max_stretch: how many times longer than without guesses a step may be expected to take.
    """

    def __init__(self, costs: Costs, max_stretch: float) -> None:
        self._costs, self._max_stretch = costs, max_stretch
        self._saved = math.inf  # seconds that trials may lose
        self._staked = 0.0  # seconds that this step's trial is expected to lose; 0: it is none
        self._steps = 0  # since trials were thought of

    def before_drafts(self, forms: Mapping[Form, Drafters], load: Load) -> Form:
        """The form to aim at, which says who shall draft."""
        best = self._best(list(forms), load, SLACK)
        self._staked = 0.0
        # A step in two lanes does not tell what its rows take, and prompt chunks take rows of their own.
        if load.lanes > 1 or not load.decoding or load.work.rows > load.decoding:
            return best
        plain = self._costs.verifying(load.work)
        self._saved = min(self._saved + TRIAL_SHARE * plain, MOST_SAVED * plain)
        self._steps += 1
        if self._steps < TRIAL_INTERVAL or not plain:
            return best
        self._steps = 0
        priced = [form for form, (asked, _) in forms.items() if not asked or self._costs.knows(len(asked))]
        form, self._staked = self._hopeful(priced, load, best, SLACK)
        self._saved -= self._staked
        return form

    def after_drafts(self, forms: Sequence[Form], load: Load) -> Form:
        """The form to take, of those that are left: what was drafted is there, and what it took is spent."""
        best = self._best(forms, load)
        if not self._staked:
            return best
        self._saved += self._staked
        form, loss = self._hopeful(forms, load, best)
        self._saved -= max(self._staked, loss)
        return form

    def best_pace(self, forms: Iterable[Form], load: Load) -> Pace:
        """Of those who decode, in the form that is best for them."""
        allowed = self._allowed(list(forms), load, SLACK)
        return max((self._pace(form, load) for form in allowed), key=lambda pace: pace.rate)

    def _best(self, forms: Sequence[Form], load: Load, slack: float = 1.0) -> Form:
        """The form with the best yield.

        Prompt chunks are a cost that falls due anyway. So a second is priced at what the decoding sequences alone could
        make of it, and that form is best whose tokens exceed the price of its added seconds by most.
        """
        plain = self._costs.verifying(load.work)
        if plain <= 0.0:  # nothing was measured yet: to guess is to find out
            return forms[-1]
        allowed = self._allowed(forms, load, slack)
        rate = max(self._pace(form, load).rate for form in allowed)

        def surplus(form: Form) -> float:
            return form.tokens - rate * (self._seconds(form, load) - plain)

        return max(allowed, key=surplus)

    def _hopeful(self, forms: Sequence[Form], load: Load, best: Form, slack: float = 1.0) -> tuple[Form, float]:
        """The form that might have the best yield, and the seconds that are lost if it takes what is expected.

        The best one, if no other might have a better yield or too little is saved for it.
        """
        rate, seconds = self._pace(best, load).rate, self._seconds(best, load)

        def lost(form: Form, verifying: float) -> float:
            tokens = best.tokens - form.tokens
            return tokens / rate + verifying + form.drafting - seconds

        def at_best(form: Form) -> float:
            return lost(form, self._costs.verifying_at_best(load.work.with_guesses(form.rows, load.context)))

        allowed = self._allowed(forms, load, slack)
        alike = [form for form in allowed if abs(form.drafting - best.drafting) <= CHEAP * seconds]
        hopeful = min(alike, key=at_best, default=best)
        worth_it = at_best(hopeful) < -WORTH * seconds
        loss = lost(hopeful, self._seconds(hopeful, load) - hopeful.drafting)
        return (hopeful, loss) if worth_it and 0.0 < loss <= self._saved else (best, 0.0)

    def _allowed(self, forms: Sequence[Form], load: Load, slack: float) -> Sequence[Form]:
        """Those that keep the time between two tokens within its bound; in two lanes it is that of a step in each."""
        others = (load.lanes - 1) * load.decoding
        plain = self._costs.verifying(load.work.with_roots(others, load.context))
        longest = self._max_stretch * plain / load.lanes
        within = [form for form in forms if self._seconds(form, load, slack) <= longest]
        return within or forms[:1]

    def _pace(self, form: Form, load: Load) -> Pace:
        """Of those that decode."""
        work = Work.of_roots(load.decoding, load.context).with_guesses(form.rows, load.context)
        seconds = together(self._costs.verifying(work), form.drafting, load.lanes)
        return Pace(load.decoding + form.tokens, seconds)

    def _seconds(self, form: Form, load: Load, slack: float = 1.0) -> float:
        """If drafts take ``slack`` times what is expected."""
        work = load.work.with_guesses(form.rows, load.context)
        return together(self._costs.verifying(work), slack * form.drafting, load.lanes)


def together(verifying: float, drafting: float, lanes: int) -> float:
    """Seconds of a step; in two lanes one goes on beside the other."""
    return verifying + drafting if lanes == 1 else max(verifying, drafting)
