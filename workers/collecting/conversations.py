"""Conversations that a model writes with itself: what it is asked, turn by turn, and what is made of the answers.

A conversation is a generator. It yields what the model should continue, gets back what it wrote, and ends when there
is no more to ask; so thousands can be under way, and whoever runs them decides how many. Knows turns and recipes.
Knows no engine and no hidden states.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from verifier.errors import BadSetting
from workers.collecting.recipes import DOCUMENT, Recipe, Recipes, choose
from workers.collecting.turns import Ids, TurnFormat

USER, WRITTEN, PROMPT = "user", "document", "prompt"  # kinds besides those of the recipes
INVENTING = (0.7, 0.85, 1.0)  # temperatures of users' turns and documents
FOLLOW_UP_TOKENS = 40
SHORTEST_DOCUMENT = 80  # characters that are left when it is cut after its last sentence


@dataclass(frozen=True)
class Ask:
    """Something for the model to continue."""

    ids: Ids
    mask: tuple[int, ...]  # 1 where the model wrote the token in an answer
    temperature: float
    seed: int
    max_tokens: int
    kind: str = ""  # what to record it as, together with what the model writes now; empty: not at all


@dataclass(frozen=True)
class Written:
    """What the model wrote. ``end`` is the mark that it ended with, None if it ran out of tokens."""

    ids: Ids
    end: int | None


Dialogue = Generator[Ask, Written, None]
Part = Generator[Ask, Written, str]  # of a dialogue; returns the words that were written


@dataclass
class Transcript:
    """A conversation so far."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], answer: bool = False) -> None:
        self.ids.extend(ids)
        self.mask.extend([int(answer)] * len(ids))


@dataclass
class Author:
    """Thinks up conversations. Equal seeds ask the same questions."""

    turns: TurnFormat
    recipes: Recipes
    temperatures: Sequence[float]  # of answers, chosen among with equal chances
    max_tokens: int  # of an answer
    rng: random.Random

    def invented(self, recipe: Recipe) -> Dialogue:
        """The model writes the user's turns, and answers them."""
        words = yield from self._first_turn(recipe)
        if not words:
            return
        following = [None] if self.rng.random() < recipe.follow_up else []
        system = self.recipes.fill(self.rng, choose(self.rng, self.recipes.assistants))
        max_tokens = min(recipe.answer_tokens, self.max_tokens)
        yield from self._answers([words, *following], recipe.kind, max_tokens, system)

    def prompted(self, turns: Sequence[str]) -> Dialogue:
        """The model answers a user's turns, one after another, as its template has it by default."""
        yield from self._answers(turns, PROMPT, self.max_tokens)

    def _answers(self, turns: Sequence[str | None], kind: str, max_tokens: int, system: str = "") -> Dialogue:
        """A turn that is None is invented. All answers are recorded, with the last one."""
        transcript = Transcript()
        for number, words in enumerate(turns):
            if number == 0:
                transcript.add(self.turns.prompt(words or "", system))
            elif words is not None:
                transcript.add(self.turns.turn(words))
            else:
                user = yield self._ask(transcript, self.rng.choice(INVENTING), FOLLOW_UP_TOKENS)
                transcript.add((*user.ids, *self.turns.answering))
            is_last = number + 1 == len(turns)
            temperature = self.rng.choice(self.temperatures)
            answer = yield self._ask(transcript, temperature, max_tokens, kind if is_last else "")
            transcript.add(answer.ids, answer=True)
            # The mark after an answer that ran out of tokens is not the model's.
            transcript.add(self.turns.between[:1], answer=answer.end == self.turns.between[0])
            transcript.add(self.turns.between[1:])

    def _first_turn(self, recipe: Recipe) -> Part:
        start = yield from self._with_documents(recipe, self.recipes.fill(self.rng, choose(self.rng, recipe.starts)))
        if not recipe.systems:
            return start
        # The model goes on after the last word, and writes the space before the next one itself.
        start = start.rstrip(" ")
        system = self.recipes.fill(self.rng, choose(self.rng, recipe.systems))
        transcript = Transcript()
        transcript.add(self.turns.opening(system, start))
        # A turn about documents is hardly the model's own, and would be recorded for a few tokens.
        kind = "" if recipe.documents else USER
        user = yield self._ask(transcript, self.rng.choice(INVENTING), recipe.user_tokens, kind)
        words = start + self.turns.text.decode(user.ids)
        if recipe.one_question:
            words = words.split("?")[0].rstrip() + self.rng.choice(["?", "?", ""])
        return words.strip()

    def _with_documents(self, recipe: Recipe, start: str) -> Part:
        words, *rest = start.split(DOCUMENT)
        for part in rest:
            words += (yield from self._document(recipe)) + part
        return words

    def _document(self, recipe: Recipe) -> Part:
        """Whole sentences, if there is at least one."""
        transcript = Transcript()
        transcript.add(self.turns.prompt(self.recipes.fill(self.rng, choose(self.rng, recipe.documents))))
        max_tokens = self.rng.randint(recipe.document_tokens // 3, recipe.document_tokens)
        written = yield self._ask(transcript, self.rng.choice(INVENTING), max_tokens, WRITTEN)
        document = self.turns.text.decode(written.ids).strip()
        end = document.rfind(".") + 1
        return document[:end] if end > SHORTEST_DOCUMENT else document

    def _ask(self, transcript: Transcript, temperature: float, max_tokens: int, kind: str = "") -> Ask:
        seed = self.rng.getrandbits(63)
        return Ask(tuple(transcript.ids), tuple(transcript.mask), temperature, seed, max_tokens, kind)


def dialogues(
    turns: TurnFormat,
    recipes: Recipes,
    *,
    stream: str,
    temperatures: Sequence[float],
    max_tokens: int,
    prompts: Sequence[Sequence[str]] = (),
    prompts_share: float = 0.0,
) -> Iterator[Dialogue]:
    """Conversations without end, or until each of the prompts had its turn if there is to be nothing else.

    Args:
        stream: names the random numbers; other streams have other conversations.
        prompts: users' turns.
        prompts_share: of the conversations; the rest are invented.
    """
    left = list(prompts)
    random.Random(stream).shuffle(left)
    shares = [recipe.share for recipe in recipes.recipes]
    for number in count():
        rng = random.Random(f"{stream} {number}")
        author = Author(turns, recipes, temperatures, max_tokens, rng)
        if left and rng.random() < prompts_share:
            yield author.prompted(left.pop())
        elif prompts_share == 1:
            return
        else:
            yield author.invented(rng.choices(recipes.recipes, shares)[0])


def read_turns(path: Path) -> list[tuple[str, ...]]:
    """The user's turns of each line of a JSON-lines file: ``{"turns": [...]}`` or ``{"prompt": "..."}``.

    Raises:
        BadSetting: it cannot be read, or has a line without either.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        found = [tuple(line["turns"] if "turns" in line else [line["prompt"]]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadSetting("prompts", str(path), f'JSON lines with "turns" or "prompt" ({error!r})') from error
    if not found or not all(turns and all(isinstance(words, str) for words in turns) for turns in found):
        raise BadSetting("prompts", str(path), "JSON lines of at least one text each")
    return found
