"""What a model is asked when it writes conversations with itself, without any model: the answers are the tests' own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.fakes import END, TEMPLATE, TEXT
from verifier.errors import BadSetting
from workers.collecting.conversations import (
    PROMPT,
    USER,
    WRITTEN,
    Ask,
    Author,
    Dialogue,
    Written,
    dialogues,
    read_turns,
)
from workers.collecting.recipes import RECIPES, Recipe, Recipes
from workers.collecting.turns import TurnFormat
from workers.template import ChatTemplate
from workers.text import Text

TURNS = TurnFormat.of(TEXT, "tiny")
DEFAULT = Recipes.load()
Model = Callable[[Ask], Written]


def spelt(ids: Sequence[int]) -> str:
    return str(TEXT._tokenizer.decode(list(ids), skip_special_tokens=False))


def with_template(template: str) -> Text:
    return Text(TEXT._tokenizer, ChatTemplate(template, {}))


def says(text: str, *, ends: bool = True) -> Written:
    return Written(tuple(TEXT.encode(text)), END if ends else None)


def hear(dialogue: Dialogue, model: Model) -> list[Ask]:
    """All that is asked, if ``model`` answers."""
    asks = [next(dialogue)]
    while True:
        try:
            asks.append(dialogue.send(model(asks[-1])))
        except StopIteration:
            return asks


def author(recipes: Recipes = DEFAULT, seed: int = 0, turns: TurnFormat = TURNS, max_tokens: int = 50) -> Author:
    return Author(turns, recipes, (0.0, 1.0), max_tokens, random.Random(seed))


def recipes_of(*recipes: Recipe, **words: Sequence[str]) -> Recipes:
    return Recipes(recipes, {"": 1}, {name: dict.fromkeys(texts, 1) for name, texts in words.items()})


# ── the template ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_template_is_taken_apart() -> None:
    assert spelt(TURNS.opening()) == "<|start|>user\n"
    assert spelt(TURNS.opening("Be kind.")) == "<|start|>system\nBe kind.<|end|>\n<|start|>user\n"
    assert spelt(TURNS.opening("Be kind.", "Who was")) == "<|start|>system\nBe kind.<|end|>\n<|start|>user\nWho was"
    assert spelt(TURNS.answering) == "<|end|>\n<|start|>assistant\n"
    assert spelt(TURNS.between) == "<|end|>\n<|start|>user\n"
    assert spelt(TURNS.turn("And you?")) == "And you?<|end|>\n<|start|>assistant\n"
    assert TURNS.user_mark == END
    assert set(TURNS.marks) == {END}


def test_turns_put_together_are_what_the_template_makes_of_them() -> None:
    messages = [("user", "Hello there"), ("assistant", "General"), ("user", "What?")]
    whole = TEXT.chat_ids([{"role": role, "content": words} for role, words in messages])
    answer = TEXT.encode("General")
    assert [*TURNS.prompt("Hello there"), *answer, *TURNS.between, *TURNS.turn("What?")] == whole


def test_a_template_without_system_prompts_is_asked_without() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    turns = TurnFormat.of(with_template(refuses), "tiny")
    assert not turns.takes_system
    assert spelt(turns.opening("Be kind.")) == "<|start|>user\n"


def test_a_user_turn_that_ends_with_words_has_no_mark() -> None:
    llama2 = (
        "{% for message in messages %}{% if message.role == 'user' %}<|start|>[INST] {{ message.content }} [/INST]"
        "{% else %} {{ message.content }} <|end|>{% endif %}{% endfor %}"
    )
    turns = TurnFormat.of(with_template(llama2), "tiny")
    assert turns.user_mark is None
    assert spelt(turns.between) == "<|end|><|start|>[INST] "
    assert spelt(turns.answering) == " [/INST]"
    assert turns.marks == (END,)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}", "special token"),
        (
            "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}<|end|>",
            "one",
        ),
    ],
)
def test_a_template_that_cannot_be_taken_apart_is_refused(template: str, words: str) -> None:
    with pytest.raises(BadSetting, match=rf"model is 'tiny', but must be one .*{words}"):
        TurnFormat.of(with_template(template), "tiny")


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(BadSetting, match="one with a chat template"):
        TurnFormat.of(Text(TEXT._tokenizer), "tiny")


# ── the recipes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_are_filled_in() -> None:
    recipes = recipes_of(verb=["den Brief ~lesen", "die Tür auf~machen"], who=["{name} und ich"], name=["er"])
    sentences = {recipes.fill(random.Random(seed), "{Who} will {verb}, um {verb:zu}.") for seed in range(40)}
    assert sentences == {
        f"Er und ich will {plain}, um {infinitive}."
        for plain in ("den Brief lesen", "die Tür aufmachen")
        for infinitive in ("den Brief zu lesen", "die Tür aufzumachen")
    }


def test_weights_count() -> None:
    recipes = Recipes((), {"": 1}, {"coin": {"heads": 3, "tails": 1}})
    rng = random.Random(0)
    heads = sum(recipes.fill(rng, "{coin}") == "heads" for _ in range(2000))
    assert 1400 < heads < 1600  # five standard deviations


def test_the_built_in_recipes_can_all_be_filled() -> None:
    """Every text that they hold, ten times; documents alone are left to be written."""
    rng = random.Random(0)
    texts = [f"{{{name}}}" for name, choices in DEFAULT.words.items() for _ in choices]
    for recipe in DEFAULT.recipes:
        texts += [*recipe.starts, *recipe.systems, *recipe.documents]
    for text in texts:
        for _ in range(10):
            filled = DEFAULT.fill(rng, text).replace("{document}", "")
            assert not re.search(r"[{}~]|  ", filled), filled
    assert len(DEFAULT.words["topic"]) > 400


def test_german_sentences_are_sentences_and_many() -> None:
    rng = random.Random(0)
    sentences = [DEFAULT.fill(rng, "{sentence}") for _ in range(2000)]
    assert len(set(sentences)) > 1600
    for sentence in sentences:
        assert sentence[0].isupper() or sentence[0] == "„", sentence
        assert sentence[-1] in ".?!“", sentence
        assert " ." not in sentence
        assert " zu zu" not in sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"starts": ["{nobody}"]}, r"\{nobody\}.*not among the words"),
        ({"starts": ["{document}"]}, "chat needs documents"),
        ({"starts": []}, "no list of texts"),
        ({"colour": "red"}, "unknown: colour"),
        ({"kind": None}, "kind"),
    ],
)
def test_a_file_of_recipes_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    entry = {"kind": "chat", "share": 1, "starts": ["Hi"], **changes}
    file = tmp_path / "recipes.json"
    file.write_text(json.dumps({"recipes": [{name: value for name, value in entry.items() if value is not None}]}))
    with pytest.raises(BadSetting, match=words):
        Recipes.load(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"recipes is .* must be a file of recipes"):
        Recipes.load(tmp_path / "none.json")


def test_the_default_recipes_are_data_that_can_be_changed(tmp_path: Path) -> None:
    data = json.loads(RECIPES.read_text(encoding="utf-8"))
    data["recipes"] = [entry for entry in data["recipes"] if entry["kind"] == "german"]
    (tmp_path / "german.json").write_text(json.dumps(data))
    assert Recipes.load(tmp_path / "german.json").kinds == ("german",)


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_user_turn_is_invented_and_answered() -> None:
    recipe = Recipe("chat", 1, {"What is ": 1}, {"You ask about {topic}.": 1}, user_tokens=9)
    invention, question = hear(
        author(recipes_of(recipe, topic=["tea"])).invented(recipe),
        lambda ask: says(" tea?" if ask.kind == USER else "A drink."),
    )
    assert spelt(invention.ids) == "<|start|>system\nYou ask about tea.<|end|>\n<|start|>user\nWhat is"
    assert (invention.kind, invention.max_tokens) == (USER, 9)
    assert spelt(question.ids) == "<|start|>user\nWhat is tea?<|end|>\n<|start|>assistant\n"
    assert (question.kind, question.max_tokens) == ("chat", 50)
    assert not any(invention.mask + question.mask)
    assert invention.seed != question.seed


@pytest.mark.parametrize("ends", [True, False])
def test_both_answers_of_two_turns_are_masked(ends: bool) -> None:
    """The end mark counts where the model wrote it, and not where an answer ran out of tokens."""
    recipe = Recipe("chat", 1, {"Hi": 1}, follow_up=1)
    replies = iter([says("Hello.", ends=ends), says("More?")])
    first, user, second = hear(author(recipes_of(recipe)).invented(recipe), lambda ask: next(replies, says("No.")))
    assert (first.kind, user.kind, second.kind) == ("", "", "chat")
    assert spelt(user.ids).endswith("<|start|>assistant\nHello.<|end|>\n<|start|>user\n")
    assert spelt(second.ids) == (
        "<|start|>user\nHi<|end|>\n<|start|>assistant\nHello.<|end|>\n<|start|>user\nMore?<|end|>\n<|start|>assistant\n"
    )
    assert len(second.mask) == len(second.ids)
    trained = [token for token, written in zip(second.ids, second.mask, strict=True) if written]
    assert spelt(trained) == ("Hello.<|end|>" if ends else "Hello.")


def test_documents_are_written_first_and_put_in() -> None:
    recipe = Recipe(
        "rag",
        1,
        {"{document} and {document}\n\nQuestion: ": 1},
        {"You ask.": 1},
        documents={"Write about tea.": 1},
        document_tokens=30,
    )
    numbers = iter(range(10))

    def model(ask: Ask) -> Written:
        if ask.kind == WRITTEN:
            return says(f"{{sentence}} {next(numbers)} " + 80 * "x" + ". And half of")
        return says("who?" if ask.kind != "rag" else "Me.")

    asks = hear(author(recipes_of(recipe)).invented(recipe), model)
    assert [ask.kind for ask in asks] == [WRITTEN, WRITTEN, "", "rag"]
    assert all(10 <= ask.max_tokens <= 30 for ask in asks[:2])
    documents = [f"{{sentence}} {number} " + 80 * "x" + "." for number in range(2)]
    assert spelt(asks[2].ids).endswith(f"user\n{documents[0]} and {documents[1]}\n\nQuestion:")
    assert f"Question:{'who?'}<|end|>" in spelt(asks[3].ids)


def test_one_question_is_kept_of_several() -> None:
    recipe = Recipe("question", 1, {"who": 1}, {"You ask.": 1}, one_question=True)
    for seed in range(9):
        *_, question = hear(author(recipes_of(recipe), seed).invented(recipe), lambda ask: says(" is it? What? Me."))
        assert re.search(r"user\nwho is it\??<\|end\|>", spelt(question.ids))


def test_nothing_is_made_of_an_empty_turn() -> None:
    recipe = Recipe("chat", 1, {"": 1}, {"You ask.": 1})
    assert len(hear(author(recipes_of(recipe)).invented(recipe), lambda ask: says(""))) == 1


def test_all_turns_of_a_prompt_are_answered() -> None:
    first, second = hear(author().prompted(["One?", "Two?"]), lambda ask: says("Yes."))
    assert (first.kind, second.kind) == ("", PROMPT)
    assert spelt(second.ids).endswith("Yes.<|end|>\n<|start|>user\nTwo?<|end|>\n<|start|>assistant\n")


def kinds_and_ids(asks: Sequence[Ask]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(ask.kind, ask.ids, ask.seed) for ask in asks]


def test_a_stream_has_conversations_of_its_own() -> None:
    def first_asks(stream: str) -> list[tuple[str, tuple[int, ...], int]]:
        found = dialogues(TURNS, DEFAULT, stream=stream, temperatures=(0,), max_tokens=9)
        return kinds_and_ids([next(dialogue) for dialogue in islice(found, 300)])

    once = first_asks("0 0")
    assert once == first_asks("0 0")
    assert len({seed for *_, seed in once}) == 300
    assert not {seed for *_, seed in once} & {seed for *_, seed in first_asks("0 1")}


def test_prompts_are_answered_once_each() -> None:
    prompts = [(f"{number}?",) for number in range(20)]
    found = dialogues(TURNS, DEFAULT, stream="0", temperatures=(0,), max_tokens=9, prompts=prompts, prompts_share=1)
    asked = [spelt(next(dialogue).ids) for dialogue in found]
    assert sorted(asked) != asked
    assert sorted(asked) == sorted(spelt(TURNS.prompt(words)) for (words,) in prompts)


def test_prompts_come_beside_inventions() -> None:
    prompts = [(f"{number}?",) for number in range(20)]
    found = dialogues(TURNS, DEFAULT, stream="0", temperatures=(0,), max_tokens=9, prompts=prompts, prompts_share=0.5)
    kinds = [next(dialogue).kind for dialogue in islice(found, 100)]
    assert kinds.count(PROMPT) == 20
    assert 5 < kinds[:30].count(PROMPT) < 20


def test_turns_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a", "b"], "category": "x"}\n\n{"prompt": "c"}\n')
    assert read_turns(file) == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", "nonsense", '{"turns": []}', '{"turns": [1]}', '{"prompt": null}']
)
def test_a_file_without_turns_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(BadSetting, match=r"prompts is .*, but must be JSON lines"):
        read_turns(file)


def test_a_turn_may_hold_any_line_break(tmp_path: Path) -> None:
    """Lines ended at each of the ten characters that Unicode knows for it, in the middle of a turn, too."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two\x85three"}\n', encoding="utf-8")
    assert read_turns(path) == [("one\u2028two\x85three",)]
