"""What the engine asks about guessing: who shall draft, how deep, which guesses are verified, in how many lanes.

The protocol, and the policy that does not think; the one that weighs costs is `workers.adaptive`. Knows no prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from drafter.base import DraftRequest
from drafter.scored import ScoredTree
from verifier.tree import TokenTree
from workers.costs import Work


class Load(NamedTuple):
    """What a step holds before anybody guesses."""

    decoding: int  # sequences whose root is in it, one row each
    work: Work  # roots and prompt chunks
    context: int  # keys that one more row attends to, on average
    lanes: int = 1  # 2: as many sequences are in another step, which is verified while this one's trees grow


class Policy(Protocol):
    """Decides within the limits that requests have; learns from what it is shown."""

    @property
    def lanes(self) -> int:
        """In how many lanes steps shall be taken from now on."""
        ...

    def glance(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        """About whom quick drafters shall be asked."""
        ...

    def observe_glance(self, requests: Sequence[DraftRequest], trees: Mapping[int, ScoredTree], seconds: float) -> None:
        """What they had to say about these, and how long it took them."""
        ...

    def limit(
        self, requests: Sequence[DraftRequest], load: Load, glance: Mapping[int, ScoredTree]
    ) -> list[DraftRequest]:
        """Whose trees are wanted, and how deep other drafters shall guess for them; 0: not at all.

        Args:
            glance: what the quick ones have to say.
        """
        ...

    def choose(self, trees: Mapping[int, ScoredTree], load: Load) -> dict[int, ScoredTree]:
        """Which of the guesses shall be verified."""
        ...

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        """What was guessed, and what was said."""
        ...

    def forget(self, sequence: int) -> None: ...

    def start_over(self) -> None:
        """Another drafter guesses: what its predecessor's guesses cost and earned says nothing about it."""
        ...

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: Set[int], hidden: bool = False
    ) -> None:
        """
        Args:
            answered: sequences that others than the quick drafters had guesses about.
            hidden: it was done before anybody looked, so took less.
        """
        ...

    def observe_verifying(self, work: Work, seconds: float) -> None:
        """Of a step in one lane."""
        ...

    def observe_lap(self, requests: Sequence[DraftRequest], work: Work, seconds: float) -> None:
        """Of a step in two lanes: what went by between the other lane's pass and the end of this one."""
        ...


class FixedPolicy:
    """Guesses as far as the limits allow, whatever it costs."""

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes

    def glance(self, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
        return list(requests)

    def observe_glance(self, requests: Sequence[DraftRequest], trees: Mapping[int, ScoredTree], seconds: float) -> None:
        pass

    def limit(
        self, requests: Sequence[DraftRequest], load: Load, glance: Mapping[int, ScoredTree]
    ) -> list[DraftRequest]:
        return list(requests)

    def choose(self, trees: Mapping[int, ScoredTree], load: Load) -> dict[int, ScoredTree]:
        return dict(trees)

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def start_over(self) -> None:
        pass

    def observe_drafting(
        self, requests: Sequence[DraftRequest], seconds: float, *, answered: Set[int], hidden: bool = False
    ) -> None:
        pass

    def observe_verifying(self, work: Work, seconds: float) -> None:
        pass

    def observe_lap(self, requests: Sequence[DraftRequest], work: Work, seconds: float) -> None:
        pass
