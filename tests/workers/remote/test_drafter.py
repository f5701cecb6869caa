"""Remote drafting over a wire with every fault: the text is that of plain decoding, and sessions are only caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drafter.base import Drafter, DraftLimits, NoDraft
from drafter.ngram import NgramDraft
from drafter.options import DraftOptions
from drafter.united import UnitedDraft
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import HeadShape, save_tiny_head
from tests.matrix import MAX_ROWS, Case, make_requests
from tests.models import save_tiny_model
from tests.workers.remote.wires import Faulty, RemoteWorld, Wire
from verifier.verifier import Verifier
from workers.config import EngineConfig
from workers.engine import Engine
from workers.remote import drafter as remote
from workers.remote import link
from workers.sequence import Progress, Request

PAGE_SIZE = 8
SHAPE = HeadShape(target_hidden=72, hidden=72, head_dim=16)
FAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "drop": {"drop": 0.3},
    "delay": {"delay": 0.5},
    "double": {"double": 0.5, "delay": 0.3},
    "corrupt": {"corrupt": 0.3},
    "all": {"drop": 0.1, "delay": 0.3, "double": 0.2, "corrupt": 0.05},
}
PLAIN: dict[tuple[float, bool], list[tuple[int, ...]]] = {}  # what plain decoding says


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": save_tiny_model(folder / "target"),
        "eagle3": save_tiny_head(folder / "head", SHAPE, eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        "eagle": save_tiny_eagle(folder / "eagle", EagleShape(target_hidden=72, hidden=72)),
        "model": save_tiny_model(folder / "model", seed=1, num_hidden_layers=1),
    }


def make_engine(verifier: Verifier, drafter: Drafter, num_pages: int, world: RemoteWorld, max_lanes: int = 1) -> Engine:
    config = EngineConfig(
        num_pages,
        PAGE_SIZE,
        max_rows=MAX_ROWS,
        limits=DraftLimits(4, 2, 6),
        draft_deadline_s=0.05,
        max_lanes=max_lanes,
    )
    return Engine(verifier, drafter, config, clock=world.clock)


def texts(engine: Engine, requests: list[Request], tick: Callable[[], None] = lambda: None) -> list[tuple[int, ...]]:
    """As `Engine.run`, with something happening before each step."""
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    open_ids = set(outputs)

    def listen(progress: Progress) -> None:
        outputs[progress.request_id] += progress.tokens
        if progress.finish:
            assert progress.finish == "length"
            open_ids.discard(progress.request_id)

    for request in requests:
        engine.submit(request, listen)
    while open_ids:
        tick()
        engine.step()
    return [tuple(outputs[request.id]) for request in requests]


@pytest.mark.parametrize(
    ("kind", "temperature", "tight", "fault", "max_lanes"),
    [
        *(("eagle3", 1.0, True, fault, 1) for fault in FAULTS),
        *(("eagle3", 1.0, True, fault, 2) for fault in ("none", "delay", "all")),
        ("eagle", 0.0, False, "all", 2),
        ("model", 1.0, False, "all", 1),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    folders: dict[str, Path],
    kind: str,
    temperature: float,
    tight: bool,
    fault: str,
    max_lanes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "CATCH_UP_ROWS", 24)
    monkeypatch.setattr(link, "REFUSED_S", 0.2)  # a corrupted greeting is another drafter's
    world = RemoteWorld(folders["target"], folders[kind], DraftOptions())
    requests = make_requests(Case("none", True, 6, PAGE_SIZE, temperature, True, tight), 160)[:4]
    num_pages = 13 * (1 if tight else 4)
    verifier = Verifier.load(folders["target"], num_pages=num_pages, page_size=PAGE_SIZE, max_rows=MAX_ROWS)
    if (temperature, tight) not in PLAIN:
        PLAIN[temperature, tight] = texts(make_engine(verifier, NoDraft(), num_pages, world), requests)
    plain = PLAIN[temperature, tight]
    wire = Wire(world.server(), world.clock, Faulty(1, **FAULTS[fault]))
    drafter = world.remote(wire, verifier)
    united = UnitedDraft({"ngram": NgramDraft(), "remote": drafter}, 160)
    engine = make_engine(verifier, united, num_pages, world, max_lanes)

    def tick() -> None:
        world.clock.now += 0.05

    figures = drafter.figures
    rounds = 0
    while rounds < 2 or figures.answered <= 5:  # the worst of wires is drafted over, now and then
        assert texts(engine, requests, tick) == plain
        engine.check_integrity()
        rounds += 1
        assert rounds < 10, figures
    assert engine.stats().counters.speculation.drafted_tokens > 0
    assert (engine.stats().counters.overlapped_steps > 0) == (max_lanes > 1)
    if fault == "none":
        assert engine.stats().drafter_failures == 0
        assert (figures.missed, figures.stale, figures.malformed) == (0, 0, 0)
        wire.run_until(world.clock.now + 1, "nobody")
        assert wire.server is not None
        assert wire.server.num_sessions == 0
        assert wire.server.desk.drafter.sessions.pages.num_used == 0
    if fault in ("drop", "delay"):
        assert figures.missed > 0
