"""Replicas that follow a script and are lost in all ways there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ray.exceptions import ActorUnavailableError

from deployments.fleet import Fleet, Placement, Report
from tests.deployments.fakes import IDLE
from workers.inbox import EngineDead
from workers.sequence import FinishReason, Progress, Request
from workers.stats import EngineStats, Speculation, Usage

Kind = Literal["dies", "leaves", "breaks", "stalls", "ends", "poisoned"]


@dataclass(frozen=True)
class Fault:
    """What happens when an attempt on a replica has said so many tokens."""

    kind: Kind
    after: int


class ScriptedFleet:
    """Replicas that all write the same ``ids``, from wherever a request stands, and one fault of each.

    Attributes:
        attempts: who was asked what.
        aborted: ids of attempts that were closed before their end.
    """

    def __init__(
        self, ids: Sequence[int], faults: Mapping[str, Fault] = MappingProxyType({}), names: str = "abc", run: int = 1
    ) -> None:
        self.ids, self.faults, self.run = list(ids), dict(faults), run
        self.alive = {name: Report(name, "fake|1", max_running=8) for name in names}
        self.fleet = Fleet()
        self.fleet.update(self.alive.values())
        self.attempts: list[tuple[str, Request]] = []
        self.aborted: list[str] = []

    async def generate(self, request: Request, placement: Placement) -> AsyncGenerator[Progress, None]:
        while (name := self.fleet.choose(request, placement, self.alive)) is None:  # noqa: ASYNC110 - as in Serve
            await asyncio.sleep(0.002)
        placement.accepted = True
        self.attempts.append((name, request))
        finished = False
        try:
            async for progress in self._write(name, request):
                finished = progress.finish is not None
                yield progress
        finally:
            if not finished:
                self.aborted.append(request.id)

    async def stats(self) -> EngineStats:
        return IDLE

    async def _write(self, name: str, request: Request) -> AsyncGenerator[Progress, None]:
        written, said = len(request.output_ids), 0
        assert request.output_ids == tuple(self.ids[:written]), "a replay goes on from another text"
        fault = self.faults.pop(name, None)
        while True:
            if fault and said >= fault.after:
                if fault.kind == "poisoned":
                    yield Progress(request.id, (), "error", error="RuntimeError: SECRET")
                await self._fail(name, fault.kind)
                return
            size = min(self.run, fault.after - said) if fault else self.run
            tokens = self.ids[written : min(written + size, request.max_tokens)]
            length = next((i for i, token in enumerate(tokens, 1) if token in request.stop_ids), len(tokens))
            run = tuple(tokens[:length])
            written, said = written + len(run), said + len(run)
            finish: FinishReason | None = "stop" if run[-1] in request.stop_ids else None
            if written == request.max_tokens:
                finish = finish or "length"
            guessed = Speculation(steps=said, verified_tokens=said)
            num_prompt = len(request.prompt_ids)
            spent = Usage(**vars(guessed), prompt_tokens=num_prompt, cached_tokens=1, output_tokens=written)
            yield Progress(request.id, run, finish, spent)
            if finish:
                return

    async def _fail(self, name: str, kind: Kind) -> None:
        """Returns when a stream just ends."""
        if kind in ("dies", "leaves"):
            del self.alive[name]
            if kind == "leaves":  # Serve has taken it off its list before it is killed
                self.fleet.update(self.alive.values())
            raise ActorUnavailableError("the actor is gone", b"")
        if kind == "breaks":
            raise EngineDead("the verifier is broken: RuntimeError: no more")
        if kind == "stalls":
            await asyncio.Event().wait()
