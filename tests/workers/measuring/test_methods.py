"""A comparison of methods on a tiny model: what it measures, goes on with, and says of those that are not there."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.tiny import make_tiny_model
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head
from verifier.config import ModelConfig
from verifier.errors import BadSetting
from workers.measuring.bench_methods import main
from workers.measuring.rounds import Figures, Outcome, Round, RoundsFile
from workers.stats import Speculation

PROMPTS = [{"category": "fish", "prompt": "one fish"}, {"category": "fowl", "prompt": "two owls, two owls"}]


@dataclass(frozen=True)
class World:
    """A model, prompts, and a head for EAGLE-3."""

    folder: Path

    def compare(self, *arguments: str) -> tuple[str, dict[str, Any]]:
        """What is printed, and its last line as data."""
        output = StringIO()
        given = ["--model", str(self.folder / "model"), "--heads", str(self.folder / "heads")]
        given += ["--prompts", str(self.folder / "prompts.jsonl"), "--out", str(self.folder / "out")]
        with redirect_stdout(output):
            assert main([*given, "--max-tokens", "6", *arguments]) == 0
        *text, data = output.getvalue().splitlines()
        return "\n".join(text), json.loads(data)

    @property
    def rounds(self) -> list[str]:
        return (self.folder / "out" / "rounds.jsonl").read_text().splitlines()[1:]


@pytest.fixture
def world(tmp_path: Path) -> World:
    model = make_tiny_model(tmp_path / "model")
    shape = HeadShape(target_hidden=72, target_vocab=ModelConfig.from_hf(model).vocab_size, hidden=72, head_dim=16)
    config = safeailab_config(shape) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    save_head(tmp_path / "heads" / "eagle3", random_weights(shape), config)
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return World(tmp_path)


def test_what_is_there_is_compared_and_what_is_not_is_told(world: World) -> None:
    text, data = world.compare()
    rows = {(row["method"], row["max_nodes"], row["temperature"]): row for row in data["methods"]}
    assert {("n-gram", 5, 0.0), ("n-gram", 5, 1.0), ("EAGLE-3", 59, 0.0), ("EAGLE-3", 16, 1.0)} <= rows.keys()
    assert all(row["changed"] == row["drafter_failures"] == 0 for row in rows.values())
    assert all(row["prompts"] == 2 and row["by_category"].keys() == {"fish", "fowl"} for row in rows.values())
    assert rows["n-gram", 5, 0.0]["weight_bytes"] == 0 < rows["EAGLE-3", 59, 0.0]["weight_bytes"]
    assert rows["EAGLE-3", 59, 0.0]["drafted_tokens"] > rows["EAGLE-3", 5, 0.0]["drafted_tokens"] > 0
    assert "Medusa: not built: python -m drafter.training train --method medusa" in text
    assert (world.folder / "out" / "methods.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_comparison_goes_on(world: World) -> None:
    """The power failed in the middle of a line."""
    _, data = world.compare("--temperature", "0", "--only", "n-gram")
    assert {row["method"] for row in data["methods"]} == {"n-gram", "n-gram, adaptive"}
    complete = world.rounds
    file = world.folder / "out" / "rounds.jsonl"
    file.write_text(file.read_text()[:-100])
    _, again = world.compare("--temperature", "0", "--only", "n-gram")
    assert len(world.rounds) == 2
    assert world.rounds[0] == complete[0]
    assert world.rounds[1] != complete[1]
    world.compare("--temperature", "0", "--only", "n-gram")
    assert len(world.rounds) == 2
    assert [row["prompts"] for row in again["methods"]] == [row["prompts"] for row in data["methods"]]


def test_weights_that_are_new_answer_beside_plain_decoding_of_their_own(world: World) -> None:
    world.compare("--temperature", "0", "--only", "n-gram", "EAGLE-3, blind")
    head = world.folder / "heads" / "eagle3" / "config.json"
    head.write_text(head.read_text() + "\n")
    _, data = world.compare("--temperature", "0", "--only", "n-gram", "EAGLE-3, blind")
    added = [json.loads(line) for line in world.rounds[2:]]
    assert len(added) == 2
    assert all(name.startswith("EAGLE-3") for each in added for name in each["outcomes"])
    assert all(each["plain"]["num_tokens"] > 0 for each in added)
    assert {row["prompts"] for row in data["methods"]} == {2}
    assert {row["method"] for row in data["methods"]} == {"n-gram", "n-gram, adaptive", "EAGLE-3, blind to noise"}


def test_rounds_under_other_conditions_are_not_mixed(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.compare("--temperature", "0", "--only", "n-gram")
    with pytest.raises(AssertionError):
        world.compare("--temperature", "0", "--max-tokens", "7")
    assert "out is " in capsys.readouterr().err


def test_a_head_that_does_not_fit_is_told_in_its_place(world: World) -> None:
    shape = HeadShape()
    save_head(world.folder / "heads" / "eagle3", random_weights(shape), safeailab_config(shape))
    text, data = world.compare("--temperature", "0")
    assert {row["method"] for row in data["methods"]} == {"n-gram", "n-gram, adaptive"}
    assert "\nEAGLE-3: eagle3 " in text


def test_a_drafter_that_fails_to_load_is_told_in_its_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: hours of other methods' measurements hang on it."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("drafter.eagle3.Eagle3Head.__init__", fail)
    text, data = world.compare("--temperature", "0")
    assert {row["method"] for row in data["methods"]} == {"n-gram", "n-gram, adaptive"}
    assert "EAGLE-3: could not be loaded: ZeroDivisionError: by design" in text


def test_speedups_are_medians_of_ratios_within_a_round() -> None:
    """The machine was slow in the second round, for both."""
    step = Speculation(1, 2, 1, 1, (1,), (1,), (1,))
    rounds = [
        Round("a", "fish", 0.0, plain := Outcome(4.0, 8, "x", step), {"n-gram": replace(plain, seconds=2.0)}),
        Round("b", "fish", 0.0, replace(plain, seconds=40.0), {"n-gram": replace(plain, seconds=10.0, digest="y")}),
        Round("c", "fish", 0.0, plain, {"n-gram": replace(plain, seconds=4.0)}),
        Round("d", "fish", 0.0, plain, {"other": plain}),
    ]
    figures = Figures.of("n-gram", rounds)
    assert figures is not None
    assert (figures.prompts, figures.speedup, figures.differing) == (3, 2.0, 1)
    assert figures.speculation.mean_acceptance_length == 2.0
    assert Figures.of("nobody", rounds) is None


def test_rounds_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    outcome = Outcome(1.5, 8, "x", Speculation(1, 2, 1, 1, (1,), (1,), (1,)), 3)
    written = Round("a", "fish", 1.0, outcome, {"n-gram": outcome})
    RoundsFile(tmp_path / "new" / "rounds.jsonl", {"model": "m"}).add(written)
    assert RoundsFile(tmp_path / "new" / "rounds.jsonl", {"model": "m"}).rounds == [written]


def test_a_file_cut_short_before_its_first_line_begins_anew(tmp_path: Path) -> None:
    """An interruption between opening and writing left an empty file, which nothing could be unpacked from."""
    (tmp_path / "rounds.jsonl").touch()
    assert RoundsFile(tmp_path / "rounds.jsonl", {"model": "m"}).rounds == []


@pytest.mark.parametrize("line", ["{", "[]", "{}", '"x"'])
def test_a_damaged_file_of_rounds_is_refused_in_a_sentence(tmp_path: Path, line: str) -> None:
    """It was a traceback, as was a folder that cannot be written to."""
    path = tmp_path / "rounds.jsonl"
    RoundsFile(path, {"model": "m"})
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(BadSetting, match=r"rounds\.jsonl there is damaged"):
        RoundsFile(path, {"model": "m"})
    with pytest.raises(BadSetting, match="a folder that can be written to"):
        RoundsFile(path / "below" / "rounds.jsonl", {"model": "m"})


def test_a_name_that_no_method_has_is_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison went on without any, and ended with an empty table and an empty picture."""
    with pytest.raises(AssertionError):
        world.compare("--only", "ngram")
    assert "only is 'ngram', but must be beginnings of names of methods, which are n-gram, " in capsys.readouterr().err


def test_a_prompt_that_leaves_no_room_is_the_prompts_fault(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer than no tokens of an answer were asked for."""
    (world.folder / "prompts.jsonl").write_text(json.dumps({"prompt": "word " * 300}))
    with pytest.raises(AssertionError):
        world.compare("--only", "n-gram")
    assert re.search(r"prompts is 'up to \d+ tokens long', but must be shorter than 256", capsys.readouterr().err)
