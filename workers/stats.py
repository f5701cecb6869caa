"""What the engine has done and is doing, in numbers.

Counters only ever rise; a rate with nothing below the line is None, never NaN. Knows no sequences and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from verifier.tree import TokenTree
from workers.costs import Prices

# A draw whose runner-up came this close (log p + g) could have gone the other way by float noise.
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Speculation:
    """How guessing went, over the verify steps of one sequence or of all.

    A verify step reads one sequence's tokens off a tree whose root is its last token; computing a prompt is none.
    *Drafted tokens* are a tree's nodes besides the root, all branches. *Accepted tokens* are those of them that became
    output: what lies beyond a stop id or a limit does not count. By position: in how many steps the tree reached that
    depth, in how many of them an accepted path did, and in how many the walk came to the depth before and found guesses
    there. For chains the drafted positions sum up to the drafted tokens; the accepted positions always sum up to the
    accepted tokens.
    """

    steps: int = 0
    verified_tokens: int = 0  # output of these steps: accepted tokens, and nearly always a bonus token each
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    tried_by_position: tuple[int, ...] = ()

    @classmethod
    def of_step(cls, tree: TokenTree, nodes: Sequence[int], num_output: int) -> Speculation:
        """One verify step whose walk over ``tree`` kept ``nodes``, root first; ``num_output`` tokens of it are output.

        A text that ends in the middle of the walk ends the count of it, too.
        """
        num_accepted = min(len(nodes) - 1, num_output)
        missed = num_output > num_accepted and nodes[num_accepted] in tree.parents
        tried, depth = num_accepted + missed, max(tree.depths)
        return cls(
            steps=1,
            verified_tokens=num_output,
            drafted_tokens=len(tree) - 1,
            accepted_tokens=num_accepted,
            drafted_by_position=(1,) * depth,
            accepted_by_position=(1,) * num_accepted + (0,) * (depth - num_accepted),
            tried_by_position=(1,) * tried + (0,) * (depth - tried),
        )

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(
            self.steps + other.steps,
            self.verified_tokens + other.verified_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
            _add(self.drafted_by_position, other.drafted_by_position),
            _add(self.accepted_by_position, other.accepted_by_position),
            _add(self.tried_by_position, other.tried_by_position),
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """Output tokens per verify step, bonus included: τ. Plain decoding has 1."""
        return self.verified_tokens / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens per drafted token; a wide tree has a low one by nature."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def acceptance_where_tried(self) -> tuple[float, ...]:
        """Of the walks that came to depth i and found guesses there, the share that went on. Bonus excluded.

        How good guesses are at each position by themselves; positions that no walk came to are left out.
        """
        pairs = zip(self.accepted_by_position, self.tried_by_position, strict=True)
        return tuple(accepted / tried for accepted, tried in pairs if tried)


def _add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


@dataclass(frozen=True)
class Usage(Speculation):
    """What one request took. Comes with its last `Progress`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when the request was first admitted
    output_tokens: int = 0  # a replay's earlier ones included
    preemptions: int = 0
    replays: int = 0  # counted by whoever replays


@dataclass
class Counters:
    """What the engine's thread counts as it goes."""

    steps: int = 0  # forward passes
    overlapped_steps: int = 0  # of these, those in one of two lanes
    rows: int = 0  # of these passes, before padding: roots, prompt tokens and guesses
    prompt_tokens: int = 0  # tokens computed in prompt chunks, a preempted request's own output among them
    cached_tokens: int = 0  # tokens that a prefix cache hit saved from being computed
    output_tokens: int = 0
    near_ties: int = 0  # output tokens drawn with a margin below NEAR_TIE
    preemptions: int = 0
    step_failures: int = 0  # forward passes that raised
    schedule_s: float = 0.0
    propose_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    speculation: Speculation = Speculation()

    def add_pass(self, rows: int, lanes: int) -> None:
        self.steps += 1
        self.overlapped_steps += lanes > 1
        self.rows += rows


@dataclass
class RemoteFigures:
    """How drafting elsewhere goes, seen from the verifier when it last wanted guesses.

    All but the first two are counters.
    """

    connected: bool = False  # a drafter has welcomed us and has not been lost since
    reason: str = "no drafter was found yet"  # why not
    welcomes: int = 0  # by drafters, new and old ones
    asked: int = 0  # messages with texts
    answered: int = 0
    missed: int = 0  # waited for to the deadline
    late: int = 0  # of the answers, those that came after it
    stale: int = 0  # answers that fitted no question
    busy: int = 0  # of the answers, those of a drafter with more to do than it can
    malformed: int = 0
    rows_sent: int = 0  # of features
    bytes_sent: int = 0
    bytes_received: int = 0
    waited_s: float = 0.0  # from question to answer, altogether
    drafted_s: float = 0.0  # of that, what drafters took from the question's arrival to the answer


@dataclass(frozen=True)
class EngineStats:
    """One moment between two steps."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int  # held by running sequences
    pages_free: int  # cached ones included, since they can be had at once
    pages_cached: int  # kept for their prefix, held by nobody
    pages_evicted: int  # counter
    drafter_failures: int  # counter: exceptions, and trees that could not be used
    late_drafts: int  # counter: collects that took longer than their deadline
    counters: Counters  # a copy
    remote: RemoteFigures | None = None  # None: all drafting is done here
    prices: Prices | None = None  # as measured so far
    draft_model: str = ""  # that guesses, by the name under which it was asked for; never "auto"
