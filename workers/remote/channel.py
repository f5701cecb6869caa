"""The wire between verifiers and remote drafters: frames over ZeroMQ, encrypted, between ends that know one another.

Each end has a key pair. A drafter's port lets in those whose public keys it was told (ZAP) and takes the key for their
name; a verifier's channel talks to the one key that it was told. Frames are bounded in number and size, and nothing
here waits longer than it is asked to. Knows frames. Knows no messages.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import zmq
from zmq.utils import z85

from workers.remote.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

MAX_FRAMES = 16  # unsent at a sender, unread at a receiver from one peer
MAX_LETTERS = 1024  # that a drafter has not looked at yet; what comes on top is dropped
# A peer that was frozen, or whose network is gone, is found out by heartbeats; one that died, at once.
HEARTBEAT_MS, DEAD_MS = 1000, 3000
CLOSE_MS = 5000
ZAP_ADDRESS = "inproc://zeromq.zap.01"


class Keys(NamedTuple):
    """A CurveZMQ key pair, 40 printable characters each."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Contact(NamedTuple):
    """Where a drafter listens, and the key that proves it."""

    address: str
    public_key: str


class Channel(Protocol):
    """A verifier's end. Frames may be lost, delayed or doubled on the way. Belongs to one thread."""

    def send(self, frame: bytes) -> bool:
        """At once or never: False when there is nobody at the other end, or no room."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame; None when none came in time."""
        ...

    def close(self) -> None: ...


class Finder(Protocol):
    """Where channels come from."""

    def channel(self) -> Channel | None:
        """A new channel to a drafter; None while none is known. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class Letter:
    """A frame at a drafter."""

    peer: str  # who sent it, proved
    route: bytes  # where answers go: one connection of the peer's
    frame: bytes
    arrived: float  # by the port's clock


class Port(Protocol):
    """A drafter's end, for many verifiers."""

    def receive(self, timeout_s: float) -> list[Letter]:
        """All that is there; waits for the first one, and returns none when none came in time."""
        ...

    def send(self, route: bytes, frame: bytes) -> None:
        """At once or never, without a word."""
        ...


class CurveChannel:
    """A `Channel` to the drafter at ``contact``."""

    def __init__(self, contact: Contact, keys: Keys) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _set_bounds(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is sent into a connection that does not stand
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, contact.public_key.encode())
        self._socket.connect(contact.address)
        weakref.finalize(self, self._socket.close)  # drafters have no end of their own: it goes with whoever holds it

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float) -> bytes | None:
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return frames[0] if len(frames) == 1 else b""

    def close(self) -> None:
        self._socket.close()


@dataclass
class Admission:
    """The public keys that are let in. May be changed from any thread."""

    _known: set[str] = field(default_factory=set)

    def admit(self, public_key: str) -> None:
        self._known.add(public_key)

    def knows(self, public_key: str) -> bool:
        return public_key in self._known


class CurvePort:
    """A `Port` on a free port of ``host``. A thread of its own moves frames, so that their arrival is known to the
    moment, and handshakes are answered, however long the drafter computes.

    Attributes:
        contact: what verifiers need to know.
        refused: handshakes of strangers so far.
    """

    def __init__(
        self, host: str, keys: Keys, admission: Admission, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.refused = 0
        self._admission, self._clock = admission, clock
        self._letters: queue.Queue[Letter] = queue.Queue(MAX_LETTERS)
        self._context = zmq.Context()  # a ZAP handler serves a whole context, so each port has its own
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._router = self._context.socket(zmq.ROUTER)
        _set_bounds(self._router)
        self._router.curve_server = True
        self._router.curve_secretkey = keys.secret.encode()
        self._router.zap_domain = b"draftree"
        number = self._router.bind_to_random_port(f"tcp://{host}")
        self.contact = Contact(f"tcp://{host}:{number}", keys.public)
        # Sockets belong to one thread: the drafter's hands its frames to the port's through these.
        self._outbox, inbox = (self._context.socket(zmq.PAIR) for _ in range(2))
        inbox.bind("inproc://outbox")
        self._outbox.connect("inproc://outbox")
        self._thread = threading.Thread(target=self._move, args=(inbox,), name="draftree-port", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> list[Letter]:
        letters: list[Letter] = []
        try:
            letters.append(self._letters.get(timeout=timeout_s))
            while True:
                letters.append(self._letters.get_nowait())
        except queue.Empty:
            return letters

    def send(self, route: bytes, frame: bytes) -> None:
        self._hand_over([route, frame])

    def close(self) -> None:
        """To be called by the thread that sends."""
        self._outbox.setsockopt(zmq.SNDTIMEO, CLOSE_MS)
        with suppress(zmq.Again):
            self._outbox.send(b"")
        self._thread.join()
        self._outbox.close()
        self._context.term()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _hand_over(self, frames: list[bytes]) -> None:
        with suppress(zmq.Again):  # the port's thread does not keep up, or is no more
            self._outbox.send_multipart(frames, zmq.NOBLOCK)

    def _move(self, inbox: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for socket in (self._zap, self._router, inbox):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._zap in ready:
                    self._judge()
                if self._router in ready:
                    self._take()
                if inbox in ready:
                    frames = inbox.recv_multipart()
                    if len(frames) == 1:
                        return
                    self._pass_on(frames)
        finally:
            for socket in (self._zap, self._router, inbox):
                socket.close()

    def _judge(self) -> None:
        """ZAP (https://rfc.zeromq.org/spec/27/): whoever shakes hands is let in if the key is known."""
        version, number, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        admitted = self._admission.knows(key)
        if not admitted:
            self.refused += 1
            logger.warning("a verifier with an unknown key was refused")
        status = [b"200", b"", key.encode()] if admitted else [b"400", b"unknown key", b""]
        self._zap.send_multipart([version, number, *status, b""])

    def _take(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        if len(frames) != 2:
            return
        route, frame = frames
        try:
            self._letters.put_nowait(Letter(str(frame.get("User-Id")), route.bytes, frame.bytes, self._clock()))
        except queue.Full:
            logger.warning("a letter was dropped: the drafter does not keep up")

    def _pass_on(self, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # the peer is gone, or does not read
            logger.debug("an answer could not be delivered")


def _set_bounds(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_FRAMES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_MS)
