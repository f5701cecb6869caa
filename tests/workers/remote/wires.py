"""A wire in one process, with a clock of its own and every fault a wire can have; and what is at its two ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import torch

from drafter.checkpoints import DraftFolder
from drafter.network import TargetParts
from drafter.network_draft import NetworkDraft
from drafter.networks import NetworkPlan, plan_network
from drafter.options import DraftOptions
from verifier.attention import create_attention
from verifier.verifier import Verifier
from verifier.weights import Checkpoint
from workers.measuring.clockwork import ManualClock
from workers.remote.channel import Letter
from workers.remote.drafter import RemoteDraft
from workers.remote.messages import FeatureType, Terms
from workers.remote.server import DraftServer

HOP_S = 0.001
Fate = Callable[[bytes], Iterable[tuple[float, bytes]]]  # what arrives of a frame, and after how long


def safe(frame: bytes) -> Iterable[tuple[float, bytes]]:
    return [(HOP_S, frame)]


def lost(frame: bytes) -> Iterable[tuple[float, bytes]]:
    return []


class Faulty:
    """Delays, drops, doubles, reorders and corrupts, each as often as asked, once the two ends have met."""

    def __init__(self, seed: int, **shares: float) -> None:
        self._random, self._shares = Random(seed), shares
        self._num_frames = 0

    def __call__(self, frame: bytes) -> Iterable[tuple[float, bytes]]:
        self._num_frames += 1
        if self._num_frames <= 2:
            yield HOP_S, frame
            return
        if self._happens("drop"):
            return
        for _ in range(1 + self._happens("double")):
            delay = self._random.uniform(0, 0.2) if self._happens("delay") else HOP_S
            yield delay, self._corrupt(frame) if self._happens("corrupt") else frame

    def _happens(self, fault: str) -> bool:
        return self._random.random() < self._shares.get(fault, 0.0)

    def _corrupt(self, frame: bytes) -> bytes:
        place = self._random.randrange(len(frame))
        return frame[:place] + bytes([frame[place] ^ (1 << self._random.randrange(8))]) + frame[place + 1 :]


@dataclass
class Wire:
    """Between any number of verifiers and one drafter at a time.

    Frames travel while somebody waits, and the clock with them.
    """

    server: DraftServer | None
    clock: ManualClock
    fate: Fate = safe
    frames: list[tuple[float, int, str, bytes, bool]] = field(default_factory=list)  # due, order, peer, frame, up
    inboxes: dict[str, list[bytes]] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)  # by verifiers
    draft_s: float = 0.0  # that the drafter takes for a round
    _numbers: count[int] = field(default_factory=count)

    def finder(self, peer: str) -> WireFinder:
        return WireFinder(self, peer)

    def post(self, peer: str, frame: bytes, *, up: bool, at: float | None = None) -> None:
        """``at``: when it was sent, if that was not now."""
        for delay, what in self.fate(frame):
            due = (self.clock.now if at is None else at) + delay
            heapq.heappush(self.frames, (due, next(self._numbers), peer, what, up))

    def run_until(self, end: float, peer: str) -> None:
        """Lets time pass until then, or until ``peer`` has got something."""
        while not self.inboxes.get(peer) and self.frames and self.frames[0][0] <= end:
            self._deliver()
        if not self.inboxes.get(peer):
            self.clock.now = max(self.clock.now, end)

    def _deliver(self) -> None:
        due, _, peer, frame, up = heapq.heappop(self.frames)
        self.clock.now = max(self.clock.now, due)
        if not up:
            self.inboxes.setdefault(peer, []).append(frame)
            return
        letters = [Letter(peer, peer.encode(), frame, self.clock.now)]
        while self.frames and self.frames[0][0] <= due and self.frames[0][4]:  # what is there by then is one round
            _, _, other, more, _ = heapq.heappop(self.frames)
            letters.append(Letter(other, other.encode(), more, self.clock.now))
        if self.server:
            self.clock.now += self.draft_s
            for route, reply in self.server.handle(letters):
                self.post(route.decode(), reply, up=False, at=due + self.draft_s)


@dataclass
class WireFinder:
    wire: Wire
    peer: str

    def channel(self) -> WireChannel | None:
        return WireChannel(self.wire, self.peer) if self.wire.server else None


@dataclass
class WireChannel:
    wire: Wire
    peer: str
    closed: bool = False

    def send(self, frame: bytes) -> bool:
        assert not self.closed
        if self.wire.server is None:
            return False
        self.wire.sent.append(frame)
        self.wire.post(self.peer, frame, up=True)
        return True

    def receive(self, timeout_s: float) -> bytes | None:
        assert not self.closed
        self.wire.run_until(self.wire.clock.now + timeout_s, self.peer)
        inbox = self.wire.inboxes.get(self.peer)
        return inbox.pop(0) if inbox else None

    def close(self) -> None:
        self.closed = True


@dataclass
class RemoteWorld:
    """A target, a network for it, and what is needed to draft with it over a wire."""

    target: Path
    folder: Path
    options: DraftOptions = field(default_factory=DraftOptions)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.checkpoint = Checkpoint.open(self.target)
        self.plan: NetworkPlan = plan_network(DraftFolder(self.folder), self.checkpoint.config, self.options)
        self.terms = Terms(self.checkpoint.fingerprint, self.plan.fingerprint(), 0, self.checkpoint.config.vocab_size)

    def network_draft(self, num_pages: int, page_size: int) -> NetworkDraft:
        with torch.inference_mode():
            network = self.plan.load(TargetParts(self.checkpoint), create_attention())
        return NetworkDraft(network, num_pages=num_pages, page_size=page_size, options=self.options)

    def server(self, num_pages: int = 128, page_size: int = 8, terms: Terms | None = None) -> DraftServer:
        drafter = self.network_draft(num_pages, page_size)
        server = DraftServer(clock=self.clock)
        server.take_up(drafter, terms or self.terms_for(drafter))
        return server

    def terms_for(self, drafter: NetworkDraft) -> Terms:
        width = drafter.fusion.width if drafter.fusion else 0
        return Terms(self.terms.target, self.terms.head, width, self.terms.vocab_size)

    def remote(
        self,
        wire: Wire,
        verifier: Verifier,
        peer: str = "a",
        deadline_s: float = 0.05,
        dtype: FeatureType = "fp16",
    ) -> RemoteDraft:
        fusion = self.plan.load_fusion(verifier.model)
        terms = Terms(self.terms.target, self.terms.head, fusion.width if fusion else 0, self.terms.vocab_size)
        return RemoteDraft(wire.finder(peer), terms, fusion, deadline_s=deadline_s, dtype=dtype, clock=self.clock)
