"""Here and elsewhere on the same prompts: what is counted, and the command from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafter.base import DraftLimits
from drafter.ngram import NgramDraft
from tests.deployments.tiny import make_tiny_model
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head
from tests.fakes import FakeVerifier
from verifier.config import ModelConfig
from verifier.errors import DraftreeError
from workers.config import EngineConfig
from workers.engine import Engine
from workers.measuring import placements
from workers.measuring.apart import DrafterJob, DraftProcess
from workers.measuring.bench_remote import main
from workers.measuring.contest import Asked
from workers.measuring.placements import LOCAL, REMOTE, Match, Place, Run, play, show
from workers.remote.channel import Keys
from workers.stats import RemoteFigures

ASKED = [Asked("fish", (number, 2, 3, 2, 3)) for number in range(5)]


def place(remote: RemoteFigures | None = None) -> Place:
    config = EngineConfig(num_pages=64, page_size=4, limits=DraftLimits(3, 2, 4))
    return Place(Engine(FakeVerifier(64, 4), NgramDraft(), config), remote)


def test_both_places_answer_the_same_prompts() -> None:
    match = play("ngram", {LOCAL: place(), REMOTE: place(RemoteFigures())}, ASKED, at_a_time=3, rounds=2, max_tokens=10)
    assert match.differing == 0
    for runs in (match.local, match.remote):
        assert [run.tokens for run in runs] == [30, 30]
        assert all(run.steps and run.verify_steps and run.seconds > 0 for run in runs)
    assert [run.steps for run in match.local] == [run.steps for run in match.remote]


def test_figures_are_of_a_step_and_of_a_message() -> None:
    """The second round ran while the machine was busy with something else, for both."""
    local = Run(seconds=2.0, tokens=40, steps=20, verify_s=1.0, propose_s=0.5, verify_steps=40, verified_tokens=60)
    remote = Run(4.0, 40, 20, 1.0, 2.0, 40, 60, asked=10, missed=1, waited_s=1.5, drafted_s=1.0, bytes_sent=20_000)
    slow = Run(8.0, 40, 20, 1.0, 2.0, 40, 60)
    match = Match("head", 2, [local, slow], [remote, slow], 0)
    assert match.ratio == 0.75
    assert match.figures(LOCAL)["tokens_per_s"] == 12.5
    assert match.figures(LOCAL)["mean_acceptance_length"] == 1.5
    assert match.figures(LOCAL)["drafter_ms"] is None
    alone = Match("head", 2, [local], [remote], 0).figures(REMOTE)
    assert (alone["verify_ms"], alone["propose_ms"]) == (50, 100)
    assert (alone["drafter_ms"], alone["wire_ms"], alone["kilobytes"]) == (100, 50, 2)
    assert show([match]).count("head") == 2


def test_a_drafter_that_never_answers_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick answers were over before the drafter had been found, and passed for remote ones."""
    monkeypatch.setattr(placements, "WELCOME_S", 0.0)
    place().await_drafter(ASKED[0])
    place(RemoteFigures(connected=True)).await_drafter(ASKED[0])
    with pytest.raises(DraftreeError, match="no drafter was found yet"):
        place(RemoteFigures()).await_drafter(ASKED[0])


@pytest.mark.slow
def test_the_command_measures_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "model")
    shape = HeadShape(target_hidden=72, target_vocab=ModelConfig.from_hf(model).vocab_size, hidden=72, head_dim=16)
    config = safeailab_config(shape) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = save_head(tmp_path / "head", random_weights(shape), config)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n} fish, fish"}) for n in range(4)))
    what = ["--prompts", str(tmp_path / "prompts.jsonl"), "--model", str(model), "--draft-model", f"ngram+{head}"]
    how = ["--at-a-time", "1", "2", "--rounds", "1", "--max-tokens", "12", "--threads", "1", "--no-adaptive"]
    assert main([*what, *how]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    matches = json.loads(last)["matches"]
    assert [(match["at_a_time"], match["changed"]) for match in matches] == [(1, 0), (2, 0)]
    assert all(match[REMOTE]["messages_per_step"] > 0 and match[REMOTE]["drafter_ms"] > 0 for match in matches)
    assert all(match[LOCAL]["messages_per_step"] == 0 for match in matches)
    assert sum("remote" in line for line in text) == 2


@pytest.mark.slow
def test_a_drafter_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    keys = Keys.generate()
    with pytest.raises(DraftreeError, match="could not be started: "):
        DraftProcess(DrafterJob("nothing", model, 8, 4, 1, keys.public), keys)
