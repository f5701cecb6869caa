"""What answers and guesses came to, counted by category of prompt. Knows an engine; knows no models and no files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from verifier.sampling import SamplingParams
from workers.engine import Engine
from workers.measuring.contest import Asked
from workers.measuring.table import NONE, number, share, table
from workers.sequence import Request
from workers.stats import Speculation


@dataclass(frozen=True)
class Tally:
    """Answers, and what guessing came to in them."""

    prompts: int = 0
    tokens: int = 0
    known: int = 0  # of these, in the draft vocabulary
    seconds: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.prompts + other.prompts,
            self.tokens + other.tokens,
            self.known + other.known,
            self.seconds + other.seconds,
            self.speculation + other.speculation,
        )

    def figures(self) -> dict[str, Any]:
        done = self.speculation
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "tokens_per_s": _rounded(self.tokens / self.seconds),
            "mean_acceptance_length": _rounded(done.mean_acceptance_length),
            "acceptance_by_position": [_rounded(rate) for rate in done.acceptance_where_tried],
            "tried_by_position": list(done.tried_by_position),
            "drafted_tokens": done.drafted_tokens,
            "accepted_tokens": done.accepted_tokens,
            "in_draft_vocabulary": _rounded(self.known / self.tokens),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def tally_answers(
    engine: Engine, asked: Sequence[Asked], temperature: float, max_tokens: int, known: Set[int] | None
) -> dict[str, Tally]:
    """One answer to each prompt; what they came to, by category.

    Args:
        known: the draft vocabulary; None: the target's.
    """
    stop_ids = frozenset(engine.verifier.config.eos_token_ids)
    tallies: dict[str, Tally] = {}
    for index, prompt in enumerate(asked):
        sampling = SamplingParams(temperature=temperature, seed=index)
        began = time.perf_counter()
        result = engine.run([Request("evaluate", prompt.ids, sampling, max_tokens, stop_ids)])[0]
        seconds = time.perf_counter() - began
        ids = result.output_ids
        num_known = len(ids) if known is None else sum(token in known for token in ids)
        tally = Tally(1, len(ids), num_known, seconds, result.usage)
        tallies[prompt.category] = tallies.get(prompt.category, Tally()) + tally
    return tallies


def show(tallies: Mapping[str, Tally], depth: int, title: str) -> str:
    """As a table, the first ``depth`` positions in it."""
    positions = map(str, range(1, depth + 1))
    header = ("", "prompts", "tokens", "tokens/s", "τ", *positions, "drafted", "accepted", "in draft vocabulary")
    rows = [_row(name, tally, depth) for name, tally in ({title: total(tallies)} | dict(tallies)).items()]
    return table(header, rows)


def _row(name: str, tally: Tally, depth: int) -> Sequence[str]:
    done = tally.speculation
    rates = [f"{rate:.2f}" for rate in done.acceptance_where_tried[:depth]]
    return (
        name,
        str(tally.prompts),
        str(tally.tokens),
        f"{tally.tokens / tally.seconds:.1f}",
        number(done.mean_acceptance_length),
        *rates,
        *[NONE] * (depth - len(rates)),
        str(done.drafted_tokens),
        str(done.accepted_tokens),
        share(tally.known, tally.tokens),
    )


def total(tallies: Mapping[str, Tally]) -> Tally:
    return sum(tallies.values(), Tally())
