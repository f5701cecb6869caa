"""A head that was fitted to three layers of its target, and what is said of it when it reads others."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deployments.fakes import TEXT
from tests.drafter.heads import safeailab_config, save_head
from tests.workers.fitted import NUM_TOKENS, SHAPE, WORDS, fitted_head, make_target
from verifier.errors import BadSetting
from workers.measuring.contest import ask, load_verifier
from workers.measuring.evaluate import main
from workers.measuring.layer_check import FirstGuess, diagnosis
from workers.measuring.prompts import Prompt

PROMPTS = [Prompt("fish", words) for words in WORDS]


@dataclass(frozen=True)
class World:
    """A target, prompts, and a head of which the config may say what it likes."""

    folder: Path
    weights: dict[str, torch.Tensor]

    def evaluate(self, *arguments: str, **config: Any) -> dict[str, Any]:
        """The figures that the command prints last."""
        head = save_head(self.folder / "head", self.weights, safeailab_config(SHAPE) | config)
        given = ["--model", str(self.folder / "target"), "--prompts", str(self.folder / "prompts.jsonl")]
        output = StringIO()
        with redirect_stdout(output):
            main(["--draft-model", str(head), *given, "--max-tokens", "8", *arguments])
        *text, figures = output.getvalue().splitlines()
        return {"text": "\n".join(text).strip(), **json.loads(figures)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target = make_target(folder / "target")
    asked = ask(TEXT, PROMPTS)
    lines = [json.dumps({"category": prompt.category, "prompt": prompt.text}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return World(folder, fitted_head(load_verifier(target, asked, NUM_TOKENS, []), asked))


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than those that the head was fitted to."""
    monkeypatch.setattr("workers.measuring.layer_check.MAX_TOKENS", NUM_TOKENS // 2)


@pytest.mark.parametrize(("said", "fault"), [((1, 2, 4), "low"), ((3, 4, 6), "high")])
def test_ids_that_are_off_by_one_are_found_out(world: World, said: tuple[int, ...], fault: str) -> None:
    figures = world.evaluate("--max-draft", "1", eagle_aux_hidden_state_layer_ids=list(said))
    found = figures["first_guess_by_layer_ids"]
    assert next(iter(found)) == ",".join(map(str, said))
    wrong, right = found[",".join(map(str, said))], found["2,3,5"]
    assert wrong["right"] < 0.2 < 0.8 < right["right"]
    assert wrong["probability"] < 0.25 < 0.7 < right["probability"]
    sentence = figures["text"].splitlines()[-1]
    assert f"one too {fault}" in sentence
    assert sentence.endswith(f"{right['probability']:.3f} after 2, 3, 5: set draft_layer_ids=2,3,5.")


def test_what_the_tool_advises_helps(world: World) -> None:
    wrong = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    figures = world.evaluate("--draft-layer-ids", "2,3,5", "--temperature", "0", "1", "--no-check-layers", **wrong)
    assert figures["temperature 0"]["acceptance_by_position"][0] > 0.9
    assert figures["temperature 1"]["prompts"] == len(PROMPTS)


def thought(*chances: float) -> FirstGuess:
    """Of the tokens that came, at as many places."""
    places = [(0, place) for place in range(len(chances))]
    return FirstGuess(dict(zip(places, chances, strict=True)), dict.fromkeys(places, True))


def test_chance_is_not_called_a_shift() -> None:
    """Better at some places and worse at others is no better; nor is what is better everywhere, but by nothing."""
    some = thought(*[0.3, 0.5] * 100)
    for others in ([0.5, 0.3] * 100, [0.3, 0.5] * 99 + [1.0, 1.0], [0.305, 0.505] * 100):
        assert "no others" in diagnosis("head", {(2, 3): some, (3, 4): thought(*others)})
    better = thought(*[0.32, 0.53] * 100)
    assert "too low" in diagnosis("head", {(2, 3): some, (3, 4): better})
    assert "too high" in diagnosis("head", {(2, 3): some, (1, 2): better})


def test_a_shift_shows_where_the_likeliest_guess_is_right_as_often() -> None:
    """A well-trained head that read one layer too low was right as often, and the check said nothing."""
    texts = [range(200)]
    here = FirstGuess.of({(0, place): {place: 0.50, 999: 0.3} for place in range(200)}, texts)
    there = FirstGuess.of({(0, place): {place: 0.55, 999: 0.3} for place in range(200)}, texts)
    assert here.rate == there.rate == 1
    assert "one too low" in diagnosis("head", {(1, 2): here, (2, 3): there})


def test_a_token_that_was_not_guessed_was_given_no_chance() -> None:
    guess = FirstGuess.of({(0, 0): {7: 0.9}, (0, 1): {5: 0.2, 6: 0.4}}, [[8, 5]])
    assert guess.chances == {(0, 0): 0.0, (0, 1): 0.2}
    assert not any(guess.right.values())


def test_a_head_at_the_edge_has_only_neighbours_that_exist(world: World) -> None:
    """Below layer 0 there is none. No ids are right here, so none are recommended."""
    figures = world.evaluate(eagle_aux_hidden_state_layer_ids=[0, 1, 4])
    assert list(figures["first_guess_by_layer_ids"]) == ["0,1,4", "1,2,5"]
    assert figures["text"].endswith("That speaks for no others.")


def test_drafters_that_fuse_no_layers_are_not_checked(world: World) -> None:
    figures = world.evaluate("--draft-model", "ngram")
    assert figures["first_guess_by_layer_ids"] == {}
    assert "Layer ids" not in figures["text"]


def test_ids_that_are_no_numbers_are_refused(world: World) -> None:
    with pytest.raises(BadSetting, match="draft_layer_ids is '2,x'"):
        world.evaluate("--draft-layer-ids", "2,x")
