"""The two ends of remote drafting against a local drafter: same trees, and sessions that are nothing but caches."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch

from drafter import sessions
from drafter.base import DraftRequest
from drafter.options import DraftOptions
from drafter.scored import ScoredTree
from tests.drafter.bench import CHAIN, PAGE_SIZE, SAVE, TEXT, Bench, Target
from tests.workers.remote.wires import HOP_S, RemoteWorld, Wire, lost, safe
from workers.remote import desk, link, server, texts
from workers.remote.channel import Letter
from workers.remote.drafter import RemoteDraft
from workers.remote.messages import Answer, Ask, Refusal, decode_to_drafter, decode_to_verifier, encode
from workers.remote.server import DraftServer

DEADLINE_S = 0.05


@dataclass(frozen=True)
class Like:
    """Equal to a tree of the same nodes and, but for float noise, the same shares: batches differ."""

    scored: ScoredTree

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, ScoredTree)
        return other.tree == self.scored.tree and other.shares == pytest.approx(self.scored.shares, abs=1e-4)


class Pair:
    """A verifier with a text, and one drafter at the other end of a wire."""

    def __init__(self, target: Target, folder: Path, num_pages: int = 64) -> None:
        self.bench = Bench(target, folder, DraftOptions())
        self.bench.verify(TEXT)
        self.world = RemoteWorld(target.folder, folder)
        self.wire = Wire(self.world.server(num_pages, PAGE_SIZE), self.world.clock)
        self.remote = self.connect()

    @property
    def server(self) -> DraftServer:
        assert self.wire.server is not None
        return self.wire.server

    def connect(self, peer: str = "a", other: Pair | None = None) -> RemoteDraft:
        """A verifier's end of the wire, with the network of this pair or of the ``other``."""
        whose = other or self
        drafter = whose.world.remote(self.wire, whose.bench.verifier, peer, DEADLINE_S, "fp32")
        drafter._clock = drafter._link._clock = self.world.clock
        self.round(drafter, [])
        self.wire.run_until(self.world.clock.now + 0.01, peer)  # the welcome
        return drafter

    def exchange(self, folder: Path) -> Pair:
        """Lets the drafter take up another head, that of the pair that is returned."""
        other = Pair(self.bench.target, SAVE["eagle3"](folder, seed=3))
        drafter = other.world.network_draft(64, PAGE_SIZE)
        self.server.take_up(drafter, other.world.terms_for(drafter))
        return other

    def round(self, drafter: RemoteDraft, batch: list[DraftRequest]) -> Mapping[int, ScoredTree]:
        return drafter.collect(drafter.start(batch), DEADLINE_S)

    def ask(self, end: int, drafter: RemoteDraft | None = None, sequence: int = 1) -> ScoredTree | None:
        """The tree on the text's first ``end`` tokens."""
        request = self.bench.request(TEXT[:end], sequence=sequence)
        return self.round(drafter or self.remote, [request]).get(sequence)

    def asked(self) -> list[Ask]:
        """All questions that were sent."""
        messages = map(decode_to_drafter, self.wire.sent)
        return [message for message in messages if isinstance(message, Ask)]

    def local(self, end: int) -> Like:
        """What a local drafter says that has never seen the text before."""
        return Like(self.bench.create().propose(self.bench.request(TEXT[:end])))

    def pass_time(self, seconds: float) -> None:
        """With a step of the engine every now and then, in which nobody may guess."""
        ends = self.world.clock.now + seconds
        while self.world.clock.now < ends:
            self.round(self.remote, [])
            self.wire.run_until(self.world.clock.now + 0.05, "nobody")

    def assert_rebuilt(self, end: int) -> None:
        """The drafter's one session equals that of a local drafter that has read the text at once."""
        fresh = self.bench.create()
        fresh.propose(self.bench.request(TEXT[:end]))
        (number,) = self.server.desk.drafter.sessions.by_sequence
        theirs = self.bench.context(fresh)
        for one, other in zip(self.bench.context(self.server.desk.drafter, number), theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(params=SAVE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str, target: Target, tmp_path: Path) -> Pair:
    return Pair(target, SAVE[kind](tmp_path / kind))


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Pair:
    return Pair(target, SAVE["eagle3"](tmp_path / "head"))


def test_trees_and_sessions_are_those_of_a_local_drafter(pair: Pair) -> None:
    end = 6
    for accepted in (0, 3, 1, 4, 0, 5, 2):
        assert pair.ask(end) == pair.local(end)
        pair.assert_rebuilt(end)
        end += accepted + 1
    turns = [ask.turns[0] for ask in pair.asked()]
    assert [turn.start for turn in turns[1:]] == [turn.end for turn in turns[:-1]], "something was sent twice"
    pair.remote.close(1)
    pair.pass_time(0.1)
    assert pair.server.num_sessions == 0
    assert pair.server.desk.drafter.sessions.pages.num_used == 0


def test_asked_twice_it_answers_twice(pair: Pair) -> None:
    """A step that failed is taken again with the same text."""
    first = pair.ask(11)
    assert first is not None
    assert pair.ask(11) == first
    assert pair.asked()[-1].turns[0].tokens == []


def test_a_lost_question_is_contained_in_the_next(pair: Pair) -> None:
    assert pair.ask(10) is not None
    pair.wire.fate = lost
    before = pair.world.clock.now
    assert pair.ask(13) is None
    assert pair.world.clock.now - before == pytest.approx(DEADLINE_S)
    before = pair.world.clock.now
    assert pair.ask(15) is None  # nobody is asked, and nobody waited for, until there is a sign of life
    assert pair.world.clock.now == before
    pair.wire.fate = safe
    pair.pass_time(1)
    assert pair.ask(17) == pair.local(17)
    assert pair.asked()[-1].turns[0].start == 10
    pair.assert_rebuilt(17)


def test_a_late_answer_brings_no_tree_but_is_an_acknowledgement(pair: Pair) -> None:
    """Its tree would have stood on a root that is no more the last token."""
    pair.wire.draft_s = 2 * DEADLINE_S
    assert pair.ask(10) is None
    pair.wire.draft_s = 0
    pair.pass_time(1)
    assert pair.remote.figures.late == 1
    assert pair.ask(12) == pair.local(12)
    assert pair.asked()[-1].turns[0].start == 10
    assert pair.remote.figures.missed == 1


def test_doubled_frames_change_nothing(pair: Pair) -> None:
    pair.wire.fate = lambda frame: [(HOP_S, frame), (HOP_S, frame), (0.01, frame)]
    for end in (8, 9, 12, 14):
        assert pair.ask(end) == pair.local(end)
        pair.assert_rebuilt(end)
        pair.pass_time(0.1)
    assert pair.remote.figures.stale >= 8
    assert pair.server.malformed == 0


def test_an_old_question_that_comes_after_a_newer_one_changes_nothing(pair: Pair) -> None:
    assert pair.ask(8)
    assert pair.ask(12)
    pair.wire.post("a", pair.wire.sent[-2], up=True)
    pair.pass_time(0.1)
    pair.assert_rebuilt(12)
    assert pair.ask(14) == pair.local(14)
    assert pair.asked()[-1].turns[0].start == 12


def test_a_restarted_drafter_is_sent_everything_again(pair: Pair) -> None:
    assert pair.ask(10)
    pair.wire.server = pair.world.server(64, PAGE_SIZE)  # another life at the same address
    assert pair.ask(12) is None
    pair.pass_time(0.5)
    assert pair.ask(14) == pair.local(14)
    pair.assert_rebuilt(14)
    assert pair.asked()[-1].turns[0].start == 0


def test_an_answer_of_an_earlier_life_is_dropped(pair: Pair) -> None:
    replies: list[bytes] = []

    def keep(frame: bytes) -> list[tuple[float, bytes]]:
        replies.append(frame)
        return [(HOP_S, frame)]

    pair.wire.fate = keep
    assert pair.ask(10)
    pair.wire.fate = safe
    pair.wire.server = pair.world.server(64, PAGE_SIZE)
    pair.ask(12)
    pair.pass_time(0.5)
    stale = pair.remote.figures.stale
    pair.wire.post("a", replies[-1], up=False)
    pair.pass_time(0.1)
    assert pair.remote.figures.stale == stale + 1
    assert pair.ask(14) == pair.local(14)


def test_a_drafter_that_claims_to_know_more_than_it_was_sent_is_sent_the_rest(pair: Pair) -> None:
    def boast(frame: bytes) -> list[tuple[float, bytes]]:
        if frame in pair.wire.sent:
            return [(HOP_S, frame)]
        answer = decode_to_verifier(frame)
        assert isinstance(answer, Answer)
        parts = [msgspec.structs.replace(part, known=1000) for part in answer.parts]
        return [(HOP_S, encode(msgspec.structs.replace(answer, parts=parts)))]

    pair.wire.fate = boast
    assert pair.ask(10) == pair.local(10)
    pair.wire.fate = safe
    assert pair.ask(14) == pair.local(14)


def test_a_drafter_that_is_down_costs_no_time_and_is_found_when_it_comes(pair: Pair) -> None:
    server, pair.wire.server = pair.wire.server, None
    late = pair.world.remote(pair.wire, pair.bench.verifier, "b", DEADLINE_S, "fp32")
    for _ in range(5):
        before = pair.world.clock.now
        assert pair.ask(10, late) is None
        assert pair.ask(10) is None
        assert pair.world.clock.now == before
    assert not late.figures.connected
    pair.wire.server = server
    for _ in range(20):
        pair.round(late, [])
        pair.pass_time(0.1)
    assert late.figures.connected
    assert pair.ask(12, late) == pair.local(12)
    assert pair.ask(12) == pair.local(12)


def test_a_drafter_that_stays_silent_is_left_for_another(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MOVE_AFTER_S", 1.0)
    other = Wire(pair.world.server(64, PAGE_SIZE), pair.world.clock)
    assert pair.ask(10)
    pair.wire.fate = lost
    assert pair.ask(12) is None
    monkeypatch.setattr(pair.remote._link, "_finder", other.finder("a"))
    pair.pass_time(1.0)
    pair.wire = other
    pair.pass_time(1.0)
    assert pair.ask(14) == pair.local(14)
    assert pair.asked()[0].turns[0].start == 0
    assert pair.remote.figures.welcomes == 2


def test_nobody_waits_for_a_drafter_that_was_left(pair: Pair) -> None:
    """With a question open, as another lane's, the engine spun on a channel that was no more up to the deadline."""

    def ticking() -> float:
        pair.world.clock.now += 1e-6
        return pair.world.clock.now

    pair.remote._clock = ticking
    assert pair.ask(10)
    pair.wire.fate = lost
    ticket = pair.remote.start([pair.bench.request(TEXT[:12])])
    pair.wire.fate = safe
    pair.wire.post("a", encode(Refusal("no more")), up=False)
    before = pair.world.clock.now
    assert pair.remote.collect(ticket, DEADLINE_S) == {}
    assert pair.world.clock.now - before < 2 * HOP_S


def test_nobody_waits_for_what_was_asked_before_a_welcome(pair: Pair) -> None:
    """It cost the whole deadline, and the drafter that had just said hello passed for a late one."""
    assert pair.ask(10)
    pair.wire.fate = lost
    ticket = pair.remote.start([pair.bench.request(TEXT[:12])])
    pair.wire.fate = safe
    pair.wire.post("a", encode(pair.server.desk.welcome("a")), up=False)
    before = pair.world.clock.now
    assert pair.remote.collect(ticket, DEADLINE_S) == {}
    assert pair.world.clock.now - before < 2 * HOP_S
    assert pair.remote.figures.missed == 0
    assert pair.ask(14) == pair.local(14)


def test_a_drafter_that_is_always_late_is_asked_ever_less(head: Pair) -> None:
    """Each try costs a step the whole deadline."""
    head.wire.draft_s = 1.5 * DEADLINE_S
    began = head.world.clock.now
    while head.world.clock.now - began < 20:
        assert head.ask(10) is None
        head.wire.run_until(head.world.clock.now + 0.01, "nobody")
    assert head.remote.figures.missed * DEADLINE_S < 1


def test_evicted_sessions_are_sent_again(kind: str, target: Target, tmp_path: Path) -> None:
    pair = Pair(target, SAVE[kind](tmp_path / kind), num_pages=16)
    for sequence in range(4):
        assert pair.ask(20, sequence=sequence) is not None
    pages = pair.server.desk.drafter.sessions.pages
    assert len(pair.server.desk.drafter.sessions.by_sequence) < 4
    assert (pair.ask(22, sequence=0) is None) == (kind != "model")  # text alone the server has kept
    assert pair.ask(24, sequence=0) == pair.local(24)
    pages.check_integrity([session.lease for session in pair.server.desk.drafter.sessions.by_sequence.values()])


def test_a_session_that_the_server_forgot_is_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_TEXTS", 2)
    for sequence in range(3):
        assert pair.ask(10, sequence=sequence) is not None
    assert pair.server.num_sessions == 2
    assert pair.ask(12, sequence=0) is None
    assert pair.ask(14, sequence=0) == pair.local(14)


def test_the_sessions_of_a_verifier_that_is_no_more_go(pair: Pair) -> None:
    """Those of a verifier that was killed stayed for as long as there was room for them."""
    assert pair.ask(10)
    assert pair.ask(10, pair.connect("b"))
    assert pair.server.num_sessions == 2
    for _ in range(3):
        pair.pass_time(desk.SILENT_S / 2)
        assert pair.ask(12)
    assert pair.server.num_sessions == 1
    assert pair.ask(14)
    assert pair.asked()[-1].turns[0].start == 12


def test_another_text_of_the_same_number_starts_a_new_session(pair: Pair) -> None:
    assert pair.ask(20)
    other = [*TEXT[:9], *TEXT[20:30]]
    pair.bench.verify(other)
    tree = pair.round(pair.remote, [pair.bench.request(other)])[1]
    assert tree == Like(pair.bench.create().propose(pair.bench.request(other)))


def test_a_long_text_comes_in_chunks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.remote._rows_at_once = 7
    rounds: list[ScoredTree | None] = []
    for _ in range(6):
        rounds.append(pair.ask(40))
        pair.wire.run_until(pair.world.clock.now + 0.01, "a")
    assert [tree is not None for tree in rounds] == [False] * 5 + [True]
    assert rounds[-1] == pair.local(40)
    pair.assert_rebuilt(40)
    assert max(len(ask.turns[0].tokens) for ask in pair.asked()) == 7
    assert pair.remote.figures.missed == 0


def test_a_long_text_does_not_keep_others_from_their_trees(pair: Pair) -> None:
    assert pair.ask(10)
    pair.remote._rows_at_once = 7
    batch = [pair.bench.request(TEXT, sequence=2), pair.bench.request(TEXT[:12])]
    assert pair.round(pair.remote, batch) == {1: pair.local(12)}
    assert sorted(len(turn.tokens) for turn in pair.asked()[-1].turns) == [2, 5]


def test_many_verifiers_share_a_pass(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    other = pair.connect("b")
    batches: list[int] = []
    propose_all = pair.server.desk.drafter.propose_all

    def counted(batch: list[DraftRequest]) -> Mapping[int, ScoredTree]:
        batches.append(len(batch))
        return propose_all(batch)

    monkeypatch.setattr(pair.server.desk.drafter, "propose_all", counted)
    one = pair.remote.start([pair.bench.request(TEXT[:10])])
    two = other.start([pair.bench.request(TEXT[:15])])
    assert pair.remote.collect(one, DEADLINE_S) == {1: pair.local(10)}
    assert other.collect(two, DEADLINE_S) == {1: pair.local(15)}
    assert batches == [2]


def test_two_questions_may_be_open_about_different_sequences(pair: Pair) -> None:
    """One for each lane; about the same sequence only one."""
    one = pair.remote.start([pair.bench.request(TEXT[:10])])
    two = pair.remote.start([pair.bench.request(TEXT[:15], sequence=2), pair.bench.request(TEXT[:10])])
    assert pair.remote.collect(two, DEADLINE_S) == {2: pair.local(15)}
    assert pair.remote.collect(one, DEADLINE_S) == {1: pair.local(10)}


def test_too_much_to_do_makes_trees_smaller_and_is_said(head: Pair) -> None:
    head.server.desk.level_s = DEADLINE_S / 2.5
    tree = head.ask(10)
    assert tree is not None
    assert max(tree.tree.depths) == 2
    assert head.remote.figures.busy == 1
    head.server.desk.level_s = 2 * DEADLINE_S
    assert head.ask(12) is None
    assert head.remote.figures.busy == 2
    assert head.remote.figures.missed == 0
    assert (head.server.asked, head.server.hurried) == (2, 2)
    assert head.asked()[-1].turns[0].start == 10
    for end in range(13, 20):  # it finds out that it is fast again
        tree = head.ask(end)
    assert tree is not None


def test_waiting_for_letters_is_not_being_busy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop = pair.world.clock, threading.Event()

    class QuietPort:
        """Waits a while, three times."""

        def __init__(self) -> None:
            self.left = 3

        def receive(self, timeout_s: float) -> list[Letter]:
            clock.now += timeout_s
            self.left -= 1
            if not self.left:
                stop.set()
            return []

        def send(self, route: bytes, frame: bytes) -> None: ...

    def handle(letters: object) -> list[tuple[bytes, bytes]]:
        clock.now += 0.25
        return []

    monkeypatch.setattr(pair.server, "handle", handle)
    pair.server.run(QuietPort(), stop)
    assert pair.server.busy_s == pytest.approx(0.75)


def test_expired_work_is_not_done(head: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> object:
        raise AssertionError("nobody waits for this")

    head.wire.draft_s = 2 * DEADLINE_S  # before the server looks at what has come
    monkeypatch.setattr(head.server.desk.drafter, "propose_all", fail)
    assert head.ask(10) is None
    head.pass_time(0.5)
    assert head.server.failures == 0
    assert head.remote.figures.late == 1


def test_a_draft_that_raises_costs_its_sessions_and_nothing_else(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pair.server.desk.drafter, "propose_all", lambda batch: 1 / 0)
        assert pair.ask(10) is None
    assert pair.server.failures == 1
    assert pair.ask(12) is None
    assert pair.ask(14) == pair.local(14)
    pair.assert_rebuilt(14)


def test_texts_beyond_the_networks_positions_are_not_sent(kind: str, target: Target, tmp_path: Path) -> None:
    pair = Pair(target, SAVE[kind](tmp_path / kind, max_position_embeddings=16))
    limits = replace(CHAIN, max_draft=2)
    local = pair.bench.create()
    for end in (10, 15, 16, 17, 18, 20):
        request = pair.bench.request(TEXT[:end], limits)
        expected = local.collect(local.start([request]), 1)
        assert pair.round(pair.remote, [request]) == expected
    assert pair.asked()[-1].turns[0].end <= 17


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("protocol", 9, "version 2 of the protocol, this verifier version 9"),
        ("target", "x" * 64, "drafts for another model"),
        ("head", "y" * 64, "another draft network (fingerprint"),
        ("width", 7, "this verifier makes them 7 wide"),
        ("vocab_size", 7, "this verifier has 7"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_in_one_sentence_on_both_ends(
    head: Pair, field: str, value: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    terms = msgspec.structs.replace(head.server.desk.terms, **{field: value})
    drafter = RemoteDraft(head.wire.finder("b"), terms, head.remote.fusion, deadline_s=1, clock=head.world.clock)
    for _ in range(10):
        assert head.ask(10, drafter) is None
        head.pass_time(0.1)
    assert words in drafter.figures.reason
    assert not drafter.figures.connected
    said = [record for record in caplog.records if words in record.getMessage()]
    assert {record.name for record in said} == {"workers.remote.server", "workers.remote.link"}
    assert len(said) == 2, "it is not said again and again"


def test_an_exchanged_network_answers_those_who_still_have_it(
    head: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verifier makes the features of its own head; the other head's would be guesses out of thin air."""
    monkeypatch.setattr(server, "RETIRE_S", 5.0)
    assert head.ask(10) == head.local(10)
    other = head.exchange(tmp_path / "other")
    later = head.connect("b", other)
    assert other.ask(12, later) == other.local(12)
    assert head.ask(12) == head.local(12)
    assert head.remote.figures.welcomes == later.figures.welcomes == 1
    head.world.clock.now += 6
    assert other.ask(14, later) == other.local(14)
    assert head.ask(14) is None
    head.pass_time(0.5)
    assert head.remote.figures.reason.startswith("The drafter has another draft network")
    assert len(head.server._desks) == 1


def test_a_network_that_comes_back_is_welcome(head: Pair, tmp_path: Path) -> None:
    first = head.server.desk
    head.exchange(tmp_path / "other")
    head.server.take_up(head.world.network_draft(64, PAGE_SIZE), first.terms)
    assert head.server.desk is first
    assert head.ask(10) == head.local(10)


def test_a_question_for_the_last_network_is_not_answered_by_the_next(head: Pair, tmp_path: Path) -> None:
    """It overtook the greeting, on another connection; its features would have been read by the wrong head."""
    assert head.ask(10)
    question = head.wire.sent[-1]
    other = head.exchange(tmp_path / "other")
    later = head.connect("a", other)
    head.wire.post("a", question, up=True)
    assert other.ask(12, later) == other.local(12)
    assert len(head.server.desk.texts) == 1


def test_a_long_read_does_not_make_the_next_trees_smaller(head: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt took to read was taken for the price of a level: a drafter that was idle called itself busy."""
    sessions = head.server.desk.drafter.sessions
    compute = sessions._compute

    def slow(behind: Sequence[object]) -> None:
        head.world.clock.now += 1.5 * DEADLINE_S
        compute(behind)  # type: ignore[arg-type]

    assert head.ask(10)
    monkeypatch.setattr(sessions, "_compute", slow)
    assert head.ask(20)
    monkeypatch.undo()
    assert head.ask(22) == head.local(22)
    assert head.remote.figures.busy == 0


def test_where_nobody_was_ready_no_level_was_measured(target: Target, tmp_path: Path) -> None:
    """Texts that are still being read were taken for trees that cost nothing, and the next trees came too late."""
    pair = Pair(target, SAVE["model"](tmp_path / "model"))
    assert pair.ask(10)
    pair.server.desk.level_s = DEADLINE_S / 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "CATCH_UP_ROWS", 5)
        assert pair.ask(20) is None
    assert pair.server.desk.level_s == DEADLINE_S / 8
    assert pair.ask(22) == pair.local(22)


def test_a_crowded_drafter_is_left_for_another(head: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers stayed with it for ever; drafters that were started because it had too much to do had nothing."""
    monkeypatch.setattr(link, "CROWDED_S", 1.0)
    other = Wire(head.world.server(64, PAGE_SIZE), head.world.clock)
    monkeypatch.setattr(head.remote._link, "_finder", other.finder("a"))
    for number in range(11):
        head.server.desk.level_s = DEADLINE_S / 2.5
        assert head.ask(10)
        assert head.remote.figures.connected == (number < 10)
        head.world.clock.now += 0.1
    head.wire = other
    head.pass_time(1.0)
    assert head.ask(14) == head.local(14)
    assert head.remote.figures.welcomes == 2
    assert head.asked()[0].turns[0].start == 0


def test_a_drafter_that_has_much_to_do_at_times_is_kept(head: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CROWDED_S", 1.0)
    for number in range(30):
        head.server.desk.level_s = DEADLINE_S / 2.5 if number % 5 else 0.0
        assert head.ask(10)
        head.world.clock.now += 0.1
    assert head.remote.figures.welcomes == 1
