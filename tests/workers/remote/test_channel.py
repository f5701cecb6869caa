"""The wire itself, between two processes: who is let in, how much, and how long anybody waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.remote import channel
from workers.remote.channel import Admission, Contact, CurveChannel, CurvePort, Keys

ROOT = Path(__file__).parents[3]
# Echoes what comes, in capitals, until it reads a line.
ECHO = """
import sys, threading
from workers.remote.channel import Admission, CurvePort, Keys
admission = Admission()
admission.admit(sys.argv[1])
port = CurvePort("127.0.0.1", Keys.generate(), admission)
print(*port.contact, flush=True)
end = threading.Thread(target=sys.stdin.readline, daemon=True)
end.start()
while end.is_alive():
    for letter in port.receive(0.01):
        assert letter.peer == sys.argv[1]
        port.send(letter.route, letter.frame.upper())
print(port.refused, flush=True)
port.close()
"""


class Echo:
    """A process with a port that lets one key in."""

    def __init__(self, known: Keys) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ECHO, known.public],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        address, key = self.process.stdout.readline().split()
        self.contact = Contact(address, key)

    def stop(self) -> int:
        """How many were refused."""
        output, _ = self.process.communicate("\n", timeout=20)
        return int(output)


@pytest.fixture
def keys() -> Keys:
    return Keys.generate()


@pytest.fixture
def echo(keys: Keys) -> Iterator[Echo]:
    echo = Echo(keys)
    yield echo
    echo.process.kill()
    echo.process.communicate()


@pytest.fixture
def connect(keys: Keys) -> Iterator[Callable[..., CurveChannel]]:
    channels: list[CurveChannel] = []

    def create(contact: Contact, own: Keys = keys) -> CurveChannel:
        channels.append(CurveChannel(contact, own))
        return channels[-1]

    yield create
    for each in channels:
        each.close()


def sent(end: CurveChannel, frame: bytes, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not end.send(frame):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_frames_go_there_and_back(echo: Echo, connect: Callable[..., CurveChannel]) -> None:
    end = connect(echo.contact)
    for frame in (b"hello", b"x" * 2**20, b"again"):
        assert sent(end, frame)
        assert end.receive(10) == frame.upper()
    assert end.receive(0) is None
    assert echo.stop() == 0


def test_an_unknown_verifier_is_not_let_in(echo: Echo, connect: Callable[..., CurveChannel]) -> None:
    end = connect(echo.contact, Keys.generate())
    assert not sent(end, b"hello", 0.5)
    assert sent(connect(echo.contact), b"hello")
    assert echo.stop() > 0


def test_a_drafter_that_cannot_prove_its_key_is_not_spoken_to(echo: Echo, connect: Callable[..., CurveChannel]) -> None:
    impostor = Contact(echo.contact.address, Keys.generate().public)
    assert not sent(connect(impostor), b"hello", 0.5)


def test_a_dead_drafter_is_known_at_once(echo: Echo, connect: Callable[..., CurveChannel]) -> None:
    end = connect(echo.contact)
    assert sent(end, b"hello")
    assert end.receive(10) == b"HELLO"
    echo.process.kill()
    echo.process.wait()
    deadline = time.monotonic() + 2  # less than silence takes to be noticed
    while end.send(b"hello"):
        assert time.monotonic() < deadline
        time.sleep(0.2)  # so that no queue is full before
    assert end.receive(0) is None


def test_a_key_may_be_admitted_later(connect: Callable[..., CurveChannel], keys: Keys) -> None:
    admission = Admission()
    port = CurvePort("127.0.0.1", Keys.generate(), admission)
    early = connect(port.contact)
    assert not sent(early, b"early", 0.3)
    admission.admit(keys.public)
    late = connect(port.contact)
    assert sent(late, b"late")
    assert [(letter.peer, letter.frame) for letter in port.receive(10)] == [(keys.public, b"late")]
    port.close()


def test_what_nobody_reads_is_dropped_and_nobody_waits(
    connect: Callable[..., CurveChannel], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues that grow were the alternative."""
    monkeypatch.setattr(channel, "MAX_LETTERS", 4)
    admission = Admission()
    admission.admit(keys.public)
    port = CurvePort("127.0.0.1", Keys.generate(), admission)
    end = connect(port.contact)
    assert sent(end, b"0")
    for _ in range(200):
        sent(end, b"more", 0.01)
    time.sleep(0.2)
    letters = port.receive(1)
    assert letters[0].frame == b"0"
    assert len(letters) == 4
    for _ in range(10_000):
        port.send(letters[0].route, b"y" * 1000)  # the other end reads none of them
    assert port.alive
    closer = threading.Thread(target=port.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
