"""The engine: schedule → propose → verify → commit, again and again.

Where the drafter works elsewhere there may be two lanes: while one step's trees grow there, another's rows are verified
here. So a step is begun, which asks for its trees, and completed when as many are under way as there are lanes.

One thread steps; any thread may submit, abort and ask for figures. Knows ids, events and counts. Knows no text, no
sockets and no Serve, and of time only what the injected clock says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from drafter.base import Drafter
from drafter.united import UnitedDraft
from verifier.acceptance import Verdict
from verifier.batch import Segment, StepPlan
from verifier.pages import PageTable
from verifier.tree import TokenTree
from workers.adaptive import AdaptivePolicy
from workers.config import TYPICAL
from workers.config import EngineConfig as EngineConfig
from workers.costs import Costs
from workers.drafting import Drafting
from workers.inbox import EngineDead as EngineDead
from workers.inbox import Inbox
from workers.policy import FixedPolicy, Policy
from workers.runner import StepRunner
from workers.scheduler import Scheduler
from workers.sequence import FinishReason, Listener, Progress, Request, TokenSequence, longest
from workers.stats import NEAR_TIE, Counters, EngineStats, Speculation, Usage
from workers.step import Step, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A request that has ended."""

    request_id: str
    output_ids: tuple[int, ...]  # without those that the request came with
    finish: FinishReason
    usage: Usage
    error: str | None


class Engine:
    """Serves requests with one verifier and one drafter.

    Either `start` gives it a thread of its own, or somebody calls `step` (or `run`, which does) from one thread.
    However many may run, no more do than the verifier takes rows.
    """

    def __init__(
        self,
        verifier: StepRunner,
        drafter: Drafter,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verifier = verifier
        self.config = config
        self.clock = clock
        self.drafter = UnitedDraft.of(drafter, verifier.config.vocab_size, clock)
        self.counters = Counters()
        self.pages = PageTable(
            config.num_pages,
            config.page_size,
            prefix_cache=config.prefix_cache,
            namespace=verifier.fingerprint.encode(),
        )
        self._exchanges = 0  # of features, so far
        features = verifier.keep_features(drafter.fusion) if drafter.fusion else None
        max_rows = min(config.max_rows, verifier.max_rows)
        max_running = min(config.max_running, max_rows)
        self.scheduler = Scheduler(self.pages, max_running, max_rows, self.counters, features)
        self.costs = Costs(verifier.padded, max_rows)
        self.policy: Policy = (
            AdaptivePolicy(self.costs, config.max_stretch, config.max_lanes)
            if config.adaptive
            else FixedPolicy(config.max_lanes)
        )
        self.drafting = Drafting(self.policy, self.scheduler, clock, config.draft_deadline_s)
        self.under_way: deque[Step] = deque()  # begun and not complete, one for each lane
        self.inbox = Inbox()
        self._thread: threading.Thread | None = None
        self._stats = self._snapshot()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """One step. False when there is nothing to do until somebody submits or aborts."""
        self._take_mail()
        lanes = min(self.policy.lanes, max(1, self.scheduler.num_decoding))
        while len(self.under_way) < lanes and (step := self._begin(lanes)):
            self.under_way.append(step)
        if self.under_way:
            self._complete(self.under_way.popleft())
        self._stats = self._snapshot()
        return self.scheduler.has_work or bool(self.under_way)

    def _begin(self, lanes: int) -> Step | None:
        with self._timed("schedule"):
            step = self.scheduler.schedule(lanes, self.under_way)
        if step.page_copies:  # before another step writes to their sources
            self.verifier.copy_pages(step.page_copies)
        with self._timed("propose"):
            self.drafting.ask(self.drafter, step)
        return step if step.turns else None

    def _complete(self, step: Step) -> None:
        step.turns = [turn for turn in step.turns if turn.stands]  # two lanes: some may be gone since it was begun
        with self._timed("propose"):
            self.drafting.collect(self.drafter, step)
        if not step.turns:
            return
        try:
            with self._timed("verify"):
                verdicts = self._verify(step)
        except Exception as error:
            self._isolate(step, error)
        else:
            with self._timed("commit"):
                self._commit(step, verdicts)
            self.drafting.observe_pass(step)

    def _verify(self, step: Step) -> list[Verdict]:
        plan = step.plan()
        output = self.verifier.forward(plan)
        lossy = self.config.acceptance == TYPICAL
        verdicts = [turn.read(logits, lossy) for turn, logits in zip(step.turns, output.logits, strict=True)]
        sources, targets = step.moves(verdicts, self.pages)
        if sources:
            self.verifier.move(sources, targets)
        self.counters.add_pass(plan.num_rows, step.lanes)
        return verdicts

    def _commit(self, step: Step, verdicts: Sequence[Verdict]) -> None:
        for turn, verdict in zip(step.turns, verdicts, strict=True):
            run = self.scheduler.commit(turn, verdict)
            self._count(turn, verdict, run)
            sequence = turn.sequence
            if drafted := step.drafted.get(sequence.number):
                self.policy.learn(sequence.number, turn.tree if len(turn.tree) > 1 else drafted.tree, run)
            if finish := sequence.finish:
                self._finish(sequence, finish, run)
            elif run:
                self._tell(sequence, Progress(sequence.request.id, run, usage=sequence.usage()))

    # ── what other threads call ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def dead(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""
        return self.inbox.closed

    def submit(self, request: Request, listener: Listener) -> None:
        """Queues the request. ``listener`` is called on the engine's thread and must be quick; its last call has a
        finish.

        Raises:
            BadRequest: it could never be served, or its id is that of a request that is being served.
            EngineDead: nor will any other.
        """
        end = longest(request, self.config, self.verifier.config.vocab_size)
        self.inbox.submit(request, listener, request.limits or self.config.limits, end)

    def abort(self, request_id: str) -> None:
        """Ends the request with finish "abort" before the next step; one that has ended, or never was, is fine."""
        self.inbox.abort(request_id)

    def exchange_drafter(self, drafter: Drafter) -> None:
        """Lets another one guess, from the next step on; it has seen nothing yet and is nobody else's. From any thread.

        One that reads other features of the target than the last guesses where these are known from the beginning, so
        for requests that are admitted from then on. The others are decoded with what other guesses there are.

        Raises:
            BadSetting: it cannot be used in any engine.
        """
        self.inbox.exchange(UnitedDraft.of(drafter, self.verifier.config.vocab_size, self.clock))

    def stats(self) -> EngineStats:
        """As of the end of the last step, requests submitted since among those waiting."""
        return replace(self._stats, waiting=self._stats.waiting + len(self.inbox.arrivals))

    def start(self) -> None:
        """Steps on a thread of its own until `stop`; when idle that thread sleeps."""
        assert self._thread is None, "an engine is started once"
        self._thread = threading.Thread(target=self._serve, name="draftree-engine", daemon=True)
        self._thread.start()

    def give_up(self, reason: str) -> None:
        """The engine is dead from now on. From any thread, as when a part that it cannot do without is lost.

        What requests are left end with finish "error" when the step in progress is over.
        """
        self.inbox.close(reason)

    def stop(self) -> None:
        """Returns when the step in progress is over and what requests were left have ended with finish "error"."""
        self.give_up("the engine was stopped")
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all()
        self.verifier.close()

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Serves the requests on the calling thread, for want of one of its own, and returns when all have ended."""
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        results: dict[str, Result] = {}

        def listen(progress: Progress) -> None:
            run = tokens[progress.request_id]
            run.extend(progress.tokens)
            if progress.finish is not None:
                assert progress.usage is not None
                results[progress.request_id] = Result(
                    progress.request_id, tuple(run), progress.finish, progress.usage, progress.error
                )

        for request in requests:
            self.submit(request, listen)
        while len(results) < len(requests):
            self.step()
        return [results[request.id] for request in requests]

    def check_integrity(self) -> None:
        """Proves the books of pages and queues. For tests and idle moments, between two steps.

        Raises:
            AssertionError: saying what is wrong.
        """
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.pages.check_integrity([sequence.lease for sequence in running if sequence.lease])
        queued = [*running, *waiting, *self.inbox.arrivals]
        assert all(sequence.lease for sequence in running), "a running sequence holds no pages"
        assert not any(sequence.lease for sequence in waiting), "a waiting sequence holds pages"
        assert sorted(s.number for s in queued) == sorted(s.number for s in self.inbox.live), "a request is lost"
        turns = [turn.sequence.number for step in self.under_way for turn in step.turns if turn.stands]
        assert len(set(turns)) == len(turns), "a sequence is in two lanes"
        for queue in (running, waiting):
            numbers = [sequence.number for sequence in queue]
            assert numbers == sorted(numbers), f"a queue is not in order of arrival: {numbers}"

    # ── the rest of a step ───────────────────────────────────────────────────────────────────────────────────────────

    def _take_mail(self) -> None:
        if drafter := self.inbox.take_drafter():
            self._exchange(drafter)
        arrivals, aborts = self.inbox.take()
        for sequence in arrivals:
            self.scheduler.add(sequence)
            if finish := sequence.finish:  # a replay of a request that was complete
                self._finish(sequence, finish)
        for sequence in aborts:
            self._finish(sequence, "abort")

    def _exchange(self, drafter: UnitedDraft) -> None:
        while self.under_way:  # with the trees of the one that was asked
            self._complete(self.under_way.popleft())
        last, self.drafter = self.drafter, drafter
        drafter.succeed(last)
        for sequence in self.inbox.live:
            last.close(sequence.number)
        self.policy.start_over()
        old, new = last.fusion, drafter.fusion
        if (old and old.key) == (new and new.key):
            return
        self._exchanges += 1
        namespace = f"{self.verifier.fingerprint} {self._exchanges}".encode()
        self.scheduler.exchange_features(self.verifier.keep_features(new) if new else None, namespace)
        if old:
            self.verifier.drop_features(old)

    def _count(self, turn: Turn, verdict: Verdict, run: Sequence[int]) -> None:
        self.counters.output_tokens += len(run)
        margins = verdict.margins[turn.num_written :][: len(run)]
        self.counters.near_ties += sum(margin < NEAR_TIE for margin in margins)
        if turn.decodes:
            done = Speculation.of_step(turn.tree, verdict.nodes, len(run))
            turn.sequence.speculation += done
            self.counters.speculation += done
        else:
            self.counters.prompt_tokens += len(turn.tree)

    def _finish(
        self, sequence: TokenSequence, finish: FinishReason, run: tuple[int, ...] = (), error: str | None = None
    ) -> None:
        """Frees all that the sequence holds, then tells its listener; the second finish of a sequence is none."""
        if sequence.finished:
            return
        sequence.finished = True
        self.scheduler.remove(sequence)
        self.drafter.close(sequence.number)
        self.policy.forget(sequence.number)
        self.inbox.forget(sequence)
        self.counters.finished[finish] += 1
        self._stats = self._snapshot()  # whoever hears of the end may look at once
        self._tell(sequence, Progress(sequence.request.id, run, finish, sequence.usage(), error))

    def _tell(self, sequence: TokenSequence, progress: Progress) -> None:
        try:
            sequence.listener(progress)
        except Exception:
            logger.exception("the listener of request %s raised", sequence.request.id)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = self.clock()
        yield
        elapsed = self.clock() - began
        setattr(self.counters, f"{phase}_s", getattr(self.counters, f"{phase}_s") + elapsed)

    def _snapshot(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_total=self.pages.num_pages,
            pages_used=self.pages.num_used,
            pages_free=self.pages.num_free,
            pages_cached=self.pages.num_cached_pages,
            pages_evicted=self.pages.num_evicted,
            drafter_failures=self.drafter.failures,
            late_drafts=self.drafter.late,
            counters=replace(self.counters, finished=dict(self.counters.finished)),
            prices=self.costs.prices(),
        )

    # ── when a step fails ────────────────────────────────────────────────────────────────────────────────────────────

    def _isolate(self, step: Step, error: Exception) -> None:
        """Nothing was committed, so each sequence can have the same turn again, alone; it ends if that fails too.

        Unless it is not the sequence's fault: then the engine is dead before anybody is told of an end.
        """
        self.counters.step_failures += 1
        if len(step.turns) > 1:
            logger.warning("a step of %d sequences failed, each gets it alone", len(step.turns), exc_info=error)
            for turn in step.turns:
                if not self.dead:
                    self._complete(Step(turns=[turn]))
            return
        sequence = step.turns[0].sequence
        logger.error("request %s failed", sequence.request.id, exc_info=error)
        self.scheduler.remove(sequence)
        if fault := self._fault():
            self.inbox.close(f"the verifier is broken: {fault}")
            self._end_all()
        else:
            self._finish(sequence, "error", error=f"{type(error).__name__}: {error}")

    def _fault(self) -> str | None:
        """Why the verifier cannot even compute one token; there is a page, as one sequence has just lost its own."""
        lease = self.pages.open((0,))
        self.pages.grow(lease, 1)
        try:
            self.verifier.forward(StepPlan((Segment(0, TokenTree.chain((0,)), tuple(lease.pages)),)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.pages.close(lease)
        return None

    def _serve(self) -> None:
        try:
            while not self.dead:
                if not self.step():
                    self.inbox.wait()
        except Exception as error:
            logger.exception("the engine's thread failed")
            self.inbox.close(f"the engine failed: {type(error).__name__}: {error}")
        self._end_all()

    def _end_all(self) -> None:
        """Those that are left when the inbox is closed end with its reason."""
        self.inbox.take()
        for sequence in self.inbox.live:
            self._finish(sequence, "error", error=self.dead)
        self._stats = self._snapshot()
