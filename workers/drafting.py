"""Asking the drafter for a step's trees and taking them in, and how long passes and drafts took beside one another.

Knows steps and the clock. What follows from seconds is for the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from drafter.base import DraftRequest
from drafter.united import Glance, UnitedDraft
from workers.policy import Load, Policy
from workers.scheduler import Scheduler
from workers.step import Question, Step

HIDDEN = 0.05  # of a draft's time: when less is waited for it in two lanes, it was done before


class Drafting:
    """One engine's questions to whoever drafts for it.

    Args:
        deadline_s: after this a step goes on without its trees.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler, clock: Callable[[], float], deadline_s: float) -> None:
        self._policy, self._scheduler, self._clock, self._deadline_s = policy, scheduler, clock, deadline_s
        self._last_lanes = 1  # that a step was begun for
        self._answered_at = clock()  # when the drafter's last answer was here
        self._lap_began: float | None = None  # in two lanes, when the last step was complete

    def ask(self, drafter: UnitedDraft, step: Step) -> None:
        """Asks for the step's trees. Not when lanes have just changed: whoever has waited for that waits no longer."""
        last_lanes, self._last_lanes = self._last_lanes, step.lanes
        if step.lanes != last_lanes:
            return
        requests = self._scheduler.draft_requests(step)
        glance = self._glance(drafter, requests, step.load)
        if not drafter.has_others:
            requests = [replace(request, limits=replace(request.limits, max_draft=0)) for request in requests]
        if batch := self._policy.limit(requests, step.load, glance.trees):
            began = self._clock()
            step.question = Question(batch, drafter.start(batch, glance), began)

    def _glance(self, drafter: UnitedDraft, requests: Sequence[DraftRequest], load: Load) -> Glance:
        began = self._clock()
        asked = self._policy.glance(requests, load) if drafter.has_quick else []
        glance = drafter.glance(asked)
        self._policy.observe_glance(asked, glance.trees, self._clock() - began)
        return glance

    def collect(self, drafter: UnitedDraft, step: Step) -> None:
        """Grafts what the drafter has to say, and tells the policy how long it took over that."""
        began = self._clock()
        if question := step.question:
            step.drafted = drafter.collect(question.ticket, self._deadline_s)
            now = self._clock()
            # It takes one question at a time: this one's turn came when it had answered the last.
            seconds = now - max(question.asked_at, self._answered_at)
            hidden = step.lanes > 1 and now - began < HIDDEN * seconds
            if asked := question.asked:
                self._policy.observe_drafting(asked, seconds, answered=drafter.heard, hidden=hidden)
            self._scheduler.graft(step, self._policy.choose(step.drafted, step.load))
        self._answered_at = self._clock()

    def observe_pass(self, step: Step) -> None:
        """Tells the policy what the pass took; in two lanes, how long after the other lane's it was done."""
        now = self._clock()
        if step.lanes == 1:
            self._policy.observe_verifying(step.work, now - self._answered_at)
        elif self._lap_began is not None:
            self._policy.observe_lap(step.question.asked if step.question else (), step.work, now - self._lap_began)
        self._lap_began = now if step.lanes > 1 else None
