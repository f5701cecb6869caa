"""What is done to the service, in which order, and to whom. Knows no load and no verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from deployments.autoscaling import DRAFTER, VERIFIER
from deployments.chaos.site import CONTROLLER, Part
from deployments.settings import Settings
from deployments.spot import drain_command

DRAIN_S = 120.0  # a drained node is told to have, as on AWS
COMMAND_S = 120.0


class Place(Protocol):
    """What faults need of a `deployments.chaos.site.Site`."""

    parts: list[Part]
    settings: Settings

    @property
    def head(self) -> str: ...

    def look(self) -> list[Part]: ...

    def nodes(self) -> list[str]: ...

    def deploy(self, settings: Settings) -> None: ...

    def suspect(self, part: Part) -> None: ...

    def end_node(self, node_id: str, *, gracefully: bool) -> None: ...

    def add_node(self) -> None: ...


@dataclass(frozen=True)
class Blow:
    """A fault that has happened.

    Attributes:
        target: who was hit, for people.
        gone: names of parts that must be replaced before the service can be whole again.
        afterwards: what is still to be done when it is.
    """

    target: str
    gone: frozenset[str]
    afterwards: Callable[[], None] = field(default=lambda: None)


Fault = Callable[[Place, Random], Blow]


def schedule(kinds: Sequence[str], random: Random) -> Iterator[str]:
    """Kinds of faults without end: all of them in some order, then all of them in another one, and so on."""
    while True:
        yield from random.sample(kinds, len(kinds))


def kill_drafter(place: Place, random: Random) -> Blow:
    return _signal(place, _one(place, DRAFTER, random), signal.SIGKILL)


def freeze_drafter(place: Place, random: Random) -> Blow:
    return _signal(place, _one(place, DRAFTER, random), signal.SIGSTOP)


def kill_verifier(place: Place, random: Random) -> Blow:
    return _signal(place, _one(place, VERIFIER, random), signal.SIGKILL)


def freeze_verifier(place: Place, random: Random) -> Blow:
    return _signal(place, _one(place, VERIFIER, random), signal.SIGSTOP)


def kill_rank(place: Place, random: Random) -> Blow:
    """Not the first, which is the replica itself."""
    part = _one(place, VERIFIER, random)
    place.suspect(part)
    rank = random.randrange(len(part.ranks))
    os.kill(part.ranks[rank], signal.SIGKILL)
    return Blow(f"rank {rank + 1} of {part.name}", frozenset({part.name}))


def kill_node(place: Place, random: Random) -> Blow:
    """One that has a verifier; another one takes its place at once."""
    blow, node = _node(place, random)
    place.end_node(node, gracefully=False)
    place.add_node()
    return blow


def drain_node(place: Place, random: Random) -> Blow:
    """As at a spot notice; another one takes its place at once. When it is empty, it ends by itself or is ended."""
    blow, node = _node(place, random)
    _, *arguments = drain_command(place.head, node, DRAIN_S)
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)
    place.add_node()
    return Blow(blow.target, blow.gone, lambda: place.end_node(node, gracefully=True))


def kill_controller(place: Place, random: Random) -> Blow:
    """Traffic must not notice."""
    return _signal(place, _one(place, CONTROLLER, random), signal.SIGKILL)


def redeploy(place: Place, _: Random) -> Blow:
    """All replicas are replaced, the ingress too, which is let finish what it has begun."""
    gone = frozenset(part.name for part in place.look() if part.deployment != CONTROLLER)
    nodes = place.settings.max_nodes
    place.deploy(place.settings.model_copy(update={"max_nodes": nodes + 1 if nodes % 2 else nodes - 1}))
    return Blow(f"max_nodes={place.settings.max_nodes}", gone)


FAULTS: dict[str, Fault] = {
    "kill drafter": kill_drafter,
    "freeze drafter": freeze_drafter,
    "kill rank": kill_rank,
    "kill verifier": kill_verifier,
    "freeze verifier": freeze_verifier,
    "kill node": kill_node,
    "drain node": drain_node,
    "kill controller": kill_controller,
    "redeploy": redeploy,
}


def _one(place: Place, deployment: str, random: Random) -> Part:
    there = [part for part in place.look() if part.deployment == deployment and part.serves]
    return random.choice(sorted(there, key=lambda part: part.name))


def _signal(place: Place, part: Part, number: signal.Signals) -> Blow:
    """One that was only frozen wakes up when others do its work, and must not do harm then."""
    place.suspect(part)
    os.kill(part.pid, number)
    return Blow(f"{part.name}", frozenset({part.name}), lambda: _wake(part.pid))


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _node(place: Place, random: Random) -> tuple[Blow, str]:
    """Of the workers, one with a verifier, and who is hit with it."""
    parts, workers = place.look(), place.nodes()
    node = random.choice(sorted({part.node for part in parts if part.deployment == VERIFIER and part.node in workers}))
    hit = [part for part in parts if part.node == node]
    for part in hit:
        place.suspect(part)
    names = sorted(part.deployment for part in hit)
    return Blow(f"{node[:8]} with {', '.join(names)}", frozenset(part.name for part in hit)), node
