"""What conversations are about, as data: how users' turns begin, under which prompts a model goes on with them.

A text holds names of other texts in braces: ``{topic}`` is one of those listed under that name, ``{Topic}`` the same
with a capital letter, ``{plan:zu}`` a German verb, marked by ``~``, as its infinitive with "zu". Lists may be mappings
to weights instead. Knows no model and no tokens.

``recipes.json`` beside this file is the default. All of it was written for this project.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verifier.errors import BadSetting

RECIPES = Path(__file__).with_name("recipes.json")
DOCUMENT = "{document}"  # stands for a text that the model writes first

Choices = Mapping[str, float]  # texts and their weights

_NAME = re.compile(r"\{(\w+)(:zu)?\}")
# German puts "zu" before the infinitive, or inside it after a separable prefix; "~" marks the place.
_MARKED_VERB = re.compile(r"(\S*)~(\S+)")


@dataclass(frozen=True)
class Recipe:
    """One kind of conversation. Counts are in tokens, at most."""

    kind: str
    share: float  # weight among the recipes
    starts: Choices  # how the user's first turn begins, or all of it
    systems: Choices = field(default_factory=dict)  # prompts under which the model goes on with it; none: it does not
    documents: Choices = field(default_factory=dict)  # requests for the documents that starts ask for
    document_tokens: int = 300
    user_tokens: int = 90
    answer_tokens: int = 170
    follow_up: float = 0.0  # share of conversations with a second turn, which the model invents
    one_question: bool = False  # the user's turn ends with its first question


@dataclass(frozen=True)
class Recipes:
    """All recipes, and the texts that they name."""

    recipes: tuple[Recipe, ...]
    assistants: Choices  # system prompts of the conversations; "" is what the model's template has by default
    words: Mapping[str, Choices]

    @classmethod
    def load(cls, path: Path = RECIPES) -> Recipes:
        """
        Raises:
            BadSetting: the file cannot be read, or something in it is unknown or missing; says what.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            words = {name: _choices(texts) for name, texts in data.get("words", {}).items()}
            recipes = tuple(_recipe(entry) for entry in data["recipes"])
            loaded = cls(recipes, _choices(data.get("assistants") or [""]), words)
            loaded._check()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadSetting("recipes", str(path), f"a file of recipes ({error})") from error
        return loaded

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(recipe.kind for recipe in self.recipes))

    def fill(self, rng: random.Random, text: str) -> str:
        """The text with all names replaced, as often as it takes, but for ``{document}``."""

        def replace(match: re.Match[str]) -> str:
            name, infinitive = match.groups()
            if match[0] == DOCUMENT:
                return match[0]
            chosen = self.fill(rng, choose(rng, self.words[name.lower()]))
            chosen = _MARKED_VERB.sub(_with_zu, chosen) if infinitive else chosen.replace("~", "")
            return chosen[:1].upper() + chosen[1:] if name[0].isupper() else chosen

        return _NAME.sub(replace, text)

    def _check(self) -> None:
        texts = [text for choices in self.words.values() for text in choices]
        for recipe in self.recipes:
            for choices in (recipe.starts, recipe.systems, recipe.documents):
                texts.extend(choices)
            if not recipe.documents and any(DOCUMENT in start for start in recipe.starts):
                raise ValueError(f"{recipe.kind} needs documents")
        for text in (*texts, *self.assistants):
            for match in _NAME.finditer(text):
                if match[0] != DOCUMENT and match[1].lower() not in self.words:
                    raise ValueError(f"{match[0]} in {text!r} is not among the words")


def choose(rng: random.Random, choices: Choices) -> str:
    return rng.choices(list(choices), list(choices.values()))[0]


def _with_zu(match: re.Match[str]) -> str:
    prefix, verb = match.groups()
    return f"{prefix}zu{verb}" if prefix else f"zu {verb}"


def _recipe(entry: Mapping[str, Any]) -> Recipe:
    known = {each.name for each in fields(Recipe)}
    if unknown := entry.keys() - known:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    lists = {name: _choices(entry[name]) for name in ("starts", "systems", "documents") if name in entry}
    return Recipe(**{**entry, **lists})


def _choices(texts: Any) -> Choices:
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{texts!r} is no list of texts")
    return texts if isinstance(texts, dict) else dict.fromkeys(texts, 1.0)
