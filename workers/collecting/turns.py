"""What a model's chat template puts round the words of a conversation, found by rendering it.

So a conversation can go on token by token, exactly as it was written, and a user's turn can be left open for the model
to write. Knows ids. Knows no template language and no marks by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from verifier.errors import BadRequest, BadSetting
from workers.text import Text

Ids = tuple[int, ...]

# Two texts that neither begin nor end with the same token.
ONE, OTHER = "Apples?", "Birds!"


@dataclass(frozen=True)
class TurnFormat:
    """One model's.

        opening(system)   words   answering   answer   between   words   answering   answer
        ├── system ──┼ user's turn ───────┼ assistant's ─────┼ user's turn ───────┼ assistant's

    ``between`` begins with the mark that ends an answer; ``answering`` with the one that ends a user's turn, unless the
    template has none but words for that.
    """

    text: Text
    takes_system: bool  # whether there may be a system prompt
    answering: Ids
    between: Ids
    user_mark: int | None

    @classmethod
    def of(cls, text: Text, model: str) -> TurnFormat:
        """
        Args:
            model: what the user called it.

        Raises:
            BadSetting: it has no chat template, or one that cannot be taken apart.
        """
        if not text.has_chat_template:
            raise BadSetting("model", model, "one with a chat template")
        one, other = (text.chat_ids([_user(words)]) for words in (ONE, OTHER))
        answering = _common_end(one, other)
        try:
            again = text.chat_ids([_user(ONE), _assistant(ONE), _user(ONE)])
            other_words = text.chat_ids([_user(ONE), _assistant(ONE), _user(OTHER)])
            other_answer = text.chat_ids([_user(ONE), _assistant(OTHER), _user(ONE)])
        except BadRequest as error:
            raise BadSetting("model", model, f"one whose chat template takes three turns ({error})") from error
        before_words, after_answer = _common_start(again, other_words), _common_end(again, other_answer)
        between = _from_mark(text, before_words[len(again) - len(after_answer) :])
        if not answering or not between:
            raise BadSetting("model", model, "one whose chat template ends an answer with a special token")
        user_mark = answering[0] if _from_mark(text, answering) == answering else None
        return cls(text, _takes_system(text), answering, between, user_mark)

    @property
    def marks(self) -> Ids:
        """What ends a turn."""
        return self.between[:1] if self.user_mark is None else (self.between[0], self.user_mark)

    def opening(self, system: str = "", words: str = "") -> Ids:
        """Up to where the user's next words come, after the first of them; their mark is still to be written.

        A system prompt that the template does not take is left out; with none, the template's own is there.
        """
        if not words:
            return _common_start(self.prompt(ONE, system), self.prompt(OTHER, system))
        return self.prompt(words, system)[: -len(self.answering)]

    def prompt(self, words: str, system: str = "") -> Ids:
        """A user's first turn, ready for the answer."""
        instructions = [{"role": "system", "content": system}] if system and self.takes_system else []
        return tuple(self.text.chat_ids([*instructions, _user(words.strip())]))

    def turn(self, words: str) -> Ids:
        """A later turn of the user's, after ``between``, ready for the answer."""
        return self.prompt(words)[len(self.opening()) :]


def _user(words: str) -> Mapping[str, str]:
    return {"role": "user", "content": words}


def _assistant(words: str) -> Mapping[str, str]:
    return {"role": "assistant", "content": words}


def _takes_system(text: Text) -> bool:
    try:
        one, other = (text.chat_ids([{"role": "system", "content": words}, _user(ONE)]) for words in (ONE, OTHER))
    except BadRequest:
        return False
    return one != other


def _common_start(one: Sequence[int], other: Sequence[int]) -> Ids:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token for token, _ in pairs)


def _common_end(one: Sequence[int], other: Sequence[int]) -> Ids:
    return _common_start(one[::-1], other[::-1])[::-1]


def _from_mark(text: Text, ids: Ids) -> Ids:
    """From the first special token on: those are no part of a text."""
    return next((ids[i:] for i, token in enumerate(ids) if not text.decode([token])), ())
