"""A tiny random model writes conversations; what is on disk afterwards is checked against the model itself."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.training.recorder import Recorder
from drafter.training.shards import Conversation, ShardFolder
from drafter.training.store import ShardStore
from tests.deployments.fakes import END, TEXT
from tests.deployments.tiny import make_tiny_model
from verifier.batch import Segment, StepPlan
from verifier.errors import BadSetting, CheckpointError, DraftreeError
from verifier.tree import TokenTree
from verifier.verifier import Verifier
from workers.collecting.collect import command_line, main
from workers.collecting.collector import MOST_FAILURES, Collector
from workers.collecting.conversations import Ask, Dialogue, Written
from workers.config import EngineConfig
from workers.engine import Engine, EngineDead

LAYER_IDS = (0, 1)  # of two
HIDDEN = 72
RECIPES = {
    "recipes": [
        {"kind": "chat", "share": 2, "starts": ["", "Why {verb}"], "systems": ["You ask."], "follow_up": 0.5,
         "user_tokens": 10, "answer_tokens": 20},
        {"kind": "summary", "share": 1, "starts": ["Sum up: {document}"], "documents": ["Write about {verb}."],
         "document_tokens": 30},
    ],
    "words": {"verb": ["walk", "sing"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_positions=512)


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    recipes = tmp_path / "recipes.json"
    recipes.write_text(json.dumps(RECIPES))
    options = {"out": tmp_path / "data", "model": model, "recipes": recipes, "batch": 8, "threads": 1, "max-tokens": 24}
    return ["--layer-ids", "0", "1", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


@pytest.fixture
def verifier(model: Path) -> Verifier:
    return Verifier.load(model, num_pages=64, page_size=8, exact=False)


def spelt(ids: Sequence[int]) -> str:
    return str(TEXT._tokenizer.decode(list(ids), skip_special_tokens=False))


def collected(folder: Path) -> list[Conversation]:
    return list(ShardFolder(folder))


def assert_states_of_a_prefill(verifier: Verifier, conversation: Conversation) -> None:
    verifier.taps = (*LAYER_IDS, 2)
    tree = TokenTree.chain(tuple(conversation.ids.tolist()))
    features = verifier.forward(StepPlan((Segment(0, tree, tuple(range(64)), tapped=True),))).features[0]
    assert features is not None
    expected = features.view(len(conversation), 3 * HIDDEN)
    recorded = torch.cat((conversation.features, conversation.last), dim=1).float()
    torch.testing.assert_close(recorded, expected, atol=1e-2, rtol=2e-3)


def test_shards_hold_conversations_in_the_models_own_template(
    arguments: list[str], verifier: Verifier, tmp_path: Path
) -> None:
    main([*arguments, "--tokens", "500"])
    header = ShardFolder(tmp_path / "data").header
    assert header.kinds == ("chat", "summary", "user", "document", "prompt")
    assert (header.layer_ids, header.fingerprint) == (LAYER_IDS, verifier.fingerprint)
    conversations = collected(tmp_path / "data")
    assert {each.kind for each in conversations} == {"chat", "summary", "user", "document"}
    assert 500 <= sum(int(each.mask.sum()) for each in conversations) < 500 + 8 * 24
    for each in conversations:
        text = spelt(each.ids.tolist())
        asked = "<|start|>system\nYou ask.<|end|>\n<|start|>user\n" if each.kind == "user" else "<|start|>user\n"
        assert text.startswith(asked)
        if each.kind != "user":
            assert "<|end|>\n<|start|>assistant\n" in text
        assert each.mask[-1] == 1  # it ends with what was written last
        assert_states_of_a_prefill(verifier, each)


def test_running_again_goes_on_and_repeats_nothing(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    lengths = []
    for goal in ("300", "700", "700"):
        main([*arguments, "--tokens", goal])
        lengths.append(len(collected(folder)))
    assert 0 < lengths[0] < lengths[1] == lengths[2]
    assert [path.name for path in sorted(folder.iterdir())] == ["seed0-00000.safetensors", "seed0-00001.safetensors"]
    texts = [tuple(each.ids.tolist()) for each in collected(folder)]
    assert len(set(texts)) == len(texts)
    main([*arguments, "--tokens", "1000", "--seed", "7"])
    assert (folder / "seed7-00000.safetensors").exists()


def test_prompts_are_answered_once_also_over_several_runs(arguments: list[str], tmp_path: Path) -> None:
    """All turns of them; and when all are answered it is over, however few tokens that gave."""
    prompts = tmp_path / "prompts.jsonl"
    questions = [[f"{number} or {number}?", "Why?"][: 1 + number % 2] for number in range(24)]
    prompts.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    for goal in ("200", "99999", "99999"):
        main([*arguments, "--prompts", str(prompts), "--tokens", goal])
    conversations = collected(tmp_path / "data")
    assert {each.kind for each in conversations} == {"prompt"}
    texts = [spelt(each.ids.tolist()) for each in conversations]
    for turns in questions:
        (text,) = [text for text in texts if text.startswith(f"<|start|>user\n{turns[0]}<|end|>\n<|start|>assistant\n")]
        assert ("<|start|>user\nWhy?<|end|>\n<|start|>assistant\n" in text) == (len(turns) == 2)


def test_ctrl_c_loses_nothing_that_is_finished(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Conversation] = []
    step, take = Collector.step, Collector.take

    def interrupted_step(collector: Collector) -> bool:
        if len(taken) > 10:
            signal.raise_signal(signal.SIGINT)
        return step(collector)

    def counting_take(collector: Collector) -> list[Conversation]:
        found = take(collector)
        taken.extend(found)
        return found

    monkeypatch.setattr(Collector, "step", interrupted_step)
    monkeypatch.setattr(Collector, "take", counting_take)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--tokens", "99999"])
    assert len(taken) > 10
    for each, expected in zip(collected(tmp_path / "data"), taken, strict=True):
        assert torch.equal(each.ids, expected.ids)
        assert torch.equal(each.last, expected.last)


def test_what_was_finished_is_kept_when_the_engine_breaks(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Verifier.forward
    plans = iter(range(80))

    def breaking(verifier: Verifier, plan: StepPlan) -> Any:
        if next(plans, None) is None:
            raise RuntimeError("broken")
        return forward(verifier, plan)

    monkeypatch.setattr(Verifier, "forward", breaking)
    with pytest.raises(EngineDead, match="broken"):
        main([*arguments, "--tokens", "99999"])
    assert collected(tmp_path / "data")


def test_data_of_other_layers_is_not_mixed(arguments: list[str], tmp_path: Path) -> None:
    main([*arguments, "--tokens", "100"])
    with pytest.raises(CheckpointError, match=r"data holds the states after layers \[0, 1\], not \[1, 2\]"):
        main([*arguments, "--tokens", "200", "--layer-ids", "1", "2"])


def test_layers_that_the_model_lacks_are_refused(arguments: list[str]) -> None:
    with pytest.raises(BadSetting, match=r"layer_ids is \[2, 3\]"):
        main([*arguments, "--layer-ids", "2", "3"])


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--prompts-share", "2"], ["--batch", "0"], []])
def test_a_mistake_on_the_command_line_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line().parse_args([*flags, *(["--out", "x"] if flags else [])])
    assert capsys.readouterr().err.count("\n") == 1


# ── the collector alone ──────────────────────────────────────────────────────────────────────────────────────────────

STOPS = frozenset(range(0, END, 12))  # a random model hardly ever writes the one end mark


def asking(number: int, heard: list[tuple[Ask, Written]], *, kind: str = "chat", turns: int = 1) -> Dialogue:
    for turn in range(turns):
        ids = (*TEXT.encode(f"{number} {turn} "),)
        ask = Ask(ids, (0,) * len(ids), number % 2, 100 * number + turn, 20, kind)
        heard.append((ask, (yield ask)))


def collector_of(verifier: Verifier, dialogues: Iterator[Dialogue], *, num_pages: int = 64) -> Collector:
    config = EngineConfig(num_pages, 8, max_model_len=128, max_running=6, max_rows=12, exact=False)
    recorder = Recorder(verifier.config, LAYER_IDS)
    return Collector(Engine(verifier, recorder, config), recorder, dialogues, stop_ids=STOPS, batch=6)


def run(collector: Collector) -> list[Conversation]:
    while collector.step():
        pass
    collector.engine.check_integrity()
    assert not collector.recorder._states
    return collector.take()


@pytest.mark.parametrize("num_pages", [12, 64])
def test_answers_are_recorded_to_their_end_mark(verifier: Verifier, num_pages: int) -> None:
    """Without a row left for guesses in many steps, and with preemption; the mark's own states are there too."""
    heard: list[tuple[Ask, Written]] = []
    collector = collector_of(verifier, (asking(number, heard) for number in range(30)), num_pages=num_pages)
    recorded = {tuple(each.ids.tolist()): each for each in run(collector)}
    assert len(heard) == 30
    assert (collector.engine.stats().counters.preemptions > 0) == (num_pages == 12)
    assert collector.engine.stats().drafter_failures == 0
    ended = [(ask, written) for ask, written in heard if written.end is not None]
    assert len(ended) > 10
    for ask, written in ended:
        assert not STOPS & set(written.ids)
        if len(written.ids) > 16:
            continue  # the limit may have come before the mark was computed
        conversation = recorded[(*ask.ids, *written.ids, written.end or 0)]
        assert conversation.mask.tolist() == [0] * len(ask.ids) + [1] * (len(written.ids) + 1)
        assert_states_of_a_prefill(verifier, conversation)
    for each in recorded.values():
        assert_states_of_a_prefill(verifier, each)


def test_the_answer_does_not_depend_on_being_recorded(verifier: Verifier) -> None:
    answers = []
    for kind in ("chat", ""):
        heard: list[tuple[Ask, Written]] = []
        recorded = run(collector_of(verifier, iter([asking(1, heard, kind=kind, turns=4)])))
        assert len(recorded) == (4 if kind else 0)
        answers.append([written for _, written in heard])
    assert answers[0] == answers[1]


def test_a_conversation_that_fails_ends_alone(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Verifier.forward
    poison = TEXT.encode("3 1 ")[0]

    def breaking(verifier: Verifier, plan: StepPlan) -> Any:
        if any(segment.start == 0 and segment.tree.tokens[0] == poison for segment in plan.segments):
            raise RuntimeError("poisoned")
        return forward(verifier, plan)

    monkeypatch.setattr(Verifier, "forward", breaking)
    heard: list[tuple[Ask, Written]] = []
    collector = collector_of(verifier, (asking(number, heard, turns=2) for number in range(8)))
    assert len(run(collector)) == 14
    assert collector.failures == 1
    assert len(heard) == 14


def test_a_conversation_too_long_for_the_model_ends_alone(verifier: Verifier) -> None:
    def too_long() -> Dialogue:
        yield Ask((1,) * 200, (0,) * 200, 0, 5, 20, "chat")

    heard: list[tuple[Ask, Written]] = []
    collector = collector_of(verifier, iter([too_long(), asking(1, heard)]))
    assert len(run(collector)) == 1
    assert collector.failures == 1


def test_nothing_but_failures_is_an_error(verifier: Verifier) -> None:
    def too_long() -> Dialogue:
        yield Ask((1,) * 200, (0,) * 200, 0, 5, 20, "chat")

    collector = collector_of(verifier, (too_long() for _ in range(10 * MOST_FAILURES)))
    with pytest.raises(DraftreeError, match="100 conversations in a row failed, the last because: prompt is '200 tok"):
        run(collector)


def test_a_store_writes_when_there_is_enough(arguments: list[str], tmp_path: Path) -> None:
    main([*arguments, "--tokens", "100"])
    folder = ShardFolder(tmp_path / "data")
    store = ShardStore(tmp_path / "data", folder.header)
    assert store.num_tokens == folder.num_trained_tokens
    (conversation, *_) = folder
    store.add([conversation] * 300)
    assert store.num_tokens == folder.num_trained_tokens + 300 * int(conversation.mask.sum())
    assert len(collected(tmp_path / "data")) == folder.num_conversations + 256
    store.flush()
    store.flush()
    assert len(collected(tmp_path / "data")) == folder.num_conversations + 300
