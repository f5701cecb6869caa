"""Every metric's name and meaning, once. Knows Prometheus's text format and the engine's figures; counts requests.

Ratios are left to whoever reads, so that none is ever 0/0:

    mean acceptance length   rate(draftree_verified_tokens_total) / rate(draftree_verify_steps_total)
    acceptance rate          rate(draftree_accepted_tokens_total) / rate(draftree_drafted_tokens_total)
    … at one position        rate(draftree_accepted_by_position_total) / rate(draftree_tried_by_position_total)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from workers.stats import EngineStats, RemoteFigures

if TYPE_CHECKING:
    from deployments.agreement import Agreement

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BROKEN = "broken"  # the stream had begun with 200 and ended with an error event


class RequestMetrics:
    """What the ingress sees of requests."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "draftree_requests",
            "Requests by endpoint and HTTP status; 499: the client left; broken: an error after the first byte.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.in_flight = Gauge("draftree_in_flight", "Requests from admission to their end.", registry=self._registry)
        self.replays = self._counter("replays", "Requests that went on elsewhere, by what became of where they were.")
        self.stalled = self._counter("stalled_attempts", "Replicas given up because they said nothing.", ())
        self.given_up = self._counter("given_up", "Requests that lost their replica once too often.", ())
        self.first_text = self._histogram("time_to_first_text", "From a request's arrival to its first text.")
        self.between_texts = self._histogram("time_between_texts", "Between two pieces of a text; a piece is one run.")
        self.whole = self._histogram("request_duration", "From a request's arrival to the end of its text.")

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ("reason",)) -> Counter:
        return Counter(f"draftree_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"draftree_{name}_seconds", text, buckets=SECONDS, registry=self._registry)

    def render(self, stats: EngineStats | None, router: RouterCollector | None = None) -> bytes:
        """Prometheus's text; without the engine's part when it could not be had."""
        others = CollectorRegistry()
        if router is not None:
            others.register(router)
        if stats is not None:
            others.register(_EngineCollector(stats))
        return generate_latest(self._registry) + generate_latest(others)


class Stopwatch:
    """One request's times, and its one count at the end."""

    def __init__(self, metrics: RequestMetrics, endpoint: str) -> None:
        self._metrics, self._endpoint = metrics, endpoint
        self._start = self._last = time.perf_counter()
        self._begun = False

    def piece(self) -> None:
        now = time.perf_counter()
        (self._metrics.between_texts if self._begun else self._metrics.first_text).observe(now - self._last)
        self._begun, self._last = True, now

    def finish(self, status: int | str) -> None:
        self._metrics.requests.labels(self._endpoint, str(status)).inc()
        if status == 200:
            self._metrics.whole.observe(time.perf_counter() - self._start)


class RouterCollector:
    """What an ingress replica goes by at the moment."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def collect(self) -> Iterable[Metric]:
        admission, guide = self._agreement.admission, self._agreement.guide
        text = "Requests of this ingress replica that are being served or wait for it."
        yield GaugeMetricFamily("draftree_admitted", text, value=admission.num_admitted)
        text = "How many of them it may have: its part of what the service can hold."
        yield GaugeMetricFamily("draftree_admissible", text, value=admission.num_admissible)
        refused = CounterMetricFamily("draftree_refused", "Requests answered 429, by what was full.", labels=["limit"])
        for limit, count in admission.refused.items():
            refused.add_metric([limit], count)
        yield refused
        text = "Seconds since the aggregator was last heard of."
        yield GaugeMetricFamily("draftree_aggregator_age_seconds", text, value=self._agreement.age_s)
        text = "Requests that were let guess deeper than their kind, to see whether that pays again."
        yield CounterMetricFamily("draftree_draft_probes", text, value=guide.probes)
        yield from self._choices()

    def _choices(self) -> Iterator[Metric]:
        kind = ["endpoint", "temperature"]
        depth = GaugeMetricFamily("draftree_draft_depth", "How deep requests of a kind may guess.", labels=kind)
        changes = CounterMetricFamily(
            "draftree_draft_depth_changes", "How often that was lowered or raised.", labels=[*kind, "direction"]
        )
        choices = self._agreement.decisions.choices if self._agreement.decisions else {}
        for key, choice in choices.items():
            depth.add_metric(key, choice.max_draft)
            changes.add_metric([*key, "down"], choice.cuts)
            changes.add_metric([*key, "up"], choice.openings)
        yield depth
        yield changes


class _EngineCollector:
    """One moment of an engine as metrics."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        yield from self._now()
        yield from self._totals()
        yield from self._positions()
        if self._stats.remote:
            yield from self._remote(self._stats.remote)

    def _now(self) -> Iterator[Metric]:
        stats = self._stats
        yield GaugeMetricFamily("draftree_running", "Requests being decoded.", value=stats.running)
        drafting = GaugeMetricFamily("draftree_drafting", "Who guesses.", labels=["draft_model"])
        drafting.add_metric([stats.draft_model], 1)
        yield drafting
        yield GaugeMetricFamily("draftree_waiting", "Requests waiting for room.", value=stats.waiting)
        pages = GaugeMetricFamily(
            "draftree_kv_pages",
            "Pages of the KV cache; cached ones are free and hold a prefix.",
            labels=["state"],
        )
        for state in ("used", "free", "cached", "total"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages

    def _totals(self) -> Iterator[Metric]:
        stats, counters, speculation = self._stats, self._stats.counters, self._stats.counters.speculation
        for name, text, value in (
            ("steps", "Forward passes.", counters.steps),
            ("overlapped_steps", "Passes beside which other sequences were drafted for.", counters.overlapped_steps),
            ("rows", "Rows of these passes: roots, prompt tokens and guesses.", counters.rows),
            ("prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the prefix cache instead.", counters.cached_tokens),
            ("output_tokens", "Tokens written.", counters.output_tokens),
            ("verify_steps", "Trees read by the acceptance walk, those of one node included.", speculation.steps),
            ("verified_tokens", "Tokens that came of these steps.", speculation.verified_tokens),
            ("drafted_tokens", "Guesses in these trees, all branches.", speculation.drafted_tokens),
            ("accepted_tokens", "Guesses that became output.", speculation.accepted_tokens),
            ("near_ties", "Tokens whose runner-up came so close that float noise could decide.", counters.near_ties),
            ("preemptions", "Requests thrown back to waiting because pages ran out.", counters.preemptions),
            ("pages_evicted", "Cached pages given up for new ones.", stats.pages_evicted),
            ("drafter_failures", "Drafts that raised or could not be used.", stats.drafter_failures),
            ("late_drafts", "Drafts that came after their deadline.", stats.late_drafts),
            ("step_failures", "Forward passes that raised.", counters.step_failures),
        ):
            yield CounterMetricFamily(f"draftree_{name}", text, value=value)
        finished = CounterMetricFamily("draftree_finished", "Requests that ended, by reason.", labels=["reason"])
        for reason, count in counters.finished.items():
            finished.add_metric([reason], count)
        yield finished
        phases = CounterMetricFamily("draftree_phase_seconds", "Time in each phase of a step.", labels=["phase"])
        for phase in ("schedule", "propose", "verify", "commit"):
            phases.add_metric([phase], getattr(counters, f"{phase}_s"))
        yield phases

    def _positions(self) -> Iterator[Metric]:
        speculation = self._stats.counters.speculation
        for name, text, counts in (
            ("drafted", "Steps whose tree reached this depth.", speculation.drafted_by_position),
            ("tried", "Steps whose walk came to guesses at this depth.", speculation.tried_by_position),
            ("accepted", "Steps whose walk went on to one of them.", speculation.accepted_by_position),
        ):
            family = CounterMetricFamily(f"draftree_{name}_by_position", text, labels=["position"])
            for position, count in enumerate(counts, start=1):
                family.add_metric([str(position)], count)
            yield family

    def _remote(self, remote: RemoteFigures) -> Iterator[Metric]:
        connected = GaugeMetricFamily(
            "draftree_remote_connected", "Whether a remote drafter drafts.", labels=["reason"]
        )
        connected.add_metric([remote.reason], remote.connected)
        yield connected
        for name, text, value in (
            ("welcomes", "Drafters found, new ones and old ones again.", remote.welcomes),
            ("questions", "Messages to drafters.", remote.asked),
            ("answers", "Answers.", remote.answered),
            ("missed", "Answers waited for to the deadline.", remote.missed),
            ("late", "Answers that came after it.", remote.late),
            ("stale", "Answers that fitted no question.", remote.stale),
            ("busy", "Answers of drafters with more to do than they can.", remote.busy),
            ("malformed", "Messages that could not be read.", remote.malformed),
            ("feature_rows", "Features sent, one for each position.", remote.rows_sent),
            ("sent_bytes", "Sent to drafters.", remote.bytes_sent),
            ("received_bytes", "Received from drafters.", remote.bytes_received),
            ("waited_seconds", "From questions to their answers.", remote.waited_s),
            ("drafted_seconds", "Of these, what the drafters took.", remote.drafted_s),
        ):
            yield CounterMetricFamily(f"draftree_remote_{name}", text, value=value)
