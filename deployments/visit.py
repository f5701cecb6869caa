"""One request from its arrival to its end, as the ingress sees it: its times, its place, and what is learnt from it."""

from __future__ import annotations

from deployments.admission import Ticket
from deployments.agreement import Agreement
from deployments.keys import ApiKey
from deployments.metrics import RequestMetrics, Stopwatch
from deployments.router import Piece
from deployments.speculation import Kind
from drafter.base import DraftLimits


class Visit:
    """
    Args:
        endpoint: "chat" or "completions".
    """

    def __init__(self, agreement: Agreement, metrics: RequestMetrics, endpoint: str, key: ApiKey) -> None:
        self.endpoint, self.key = endpoint, key
        self._agreement = agreement
        self._watch = Stopwatch(metrics, endpoint)
        self._ticket: Ticket | None = None
        self._kind = Kind.of(endpoint, 0.0)

    def admit(self, num_prompt: int, temperature: float, limits: DraftLimits) -> DraftLimits:
        """Takes a place, and says how far the request shall guess: no further than ``limits``.

        Raises:
            ApiError: 429, there is none.
        """
        self._ticket = self._agreement.admission.admit(self.key, num_prompt)
        self._kind = Kind.of(self.endpoint, temperature)
        return self._agreement.guide.limits(self._kind, limits)

    def piece(self, piece: Piece) -> None:
        """Some more text was written."""
        self._watch.piece()
        if self._ticket:
            self._ticket.num_written = piece.num_tokens
        if piece.usage and piece.usage.speculation.steps:
            self._agreement.guide.observe(self._kind, piece.usage.speculation)

    def finish(self, status: int | str) -> None:
        """The request has ended; gives its place back."""
        self._watch.finish(status)
        if self._ticket:
            self._ticket.close()
