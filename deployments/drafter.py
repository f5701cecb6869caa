"""The drafter's deployment: a draft server on its own thread, and the door where verifiers introduce themselves.

What verifiers and drafters have to say to one another in every step goes over a channel of theirs, not through here.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from deployments.autoscaling import DrafterReport
from deployments.checks import device_of, engine_spec
from deployments.exchange import ClusterChoice, Exchange, with_choice
from deployments.settings import Settings
from verifier.errors import DraftreeError
from verifier.weights import Checkpoint
from workers.build import locate_model
from workers.remote.placement import load_network, remote_part

if TYPE_CHECKING:
    from drafter.network_draft import NetworkDraft
    from workers.remote.channel import Contact
    from workers.remote.messages import Terms

log = logging.getLogger("ray.serve")
STALL_S = 30.0  # without a round in this time, the server is given up for lost; it makes one a second when idle


class DrafterReplica:
    """Loads the draft network, and of the model what that shares with it, and drafts for all verifiers that ask."""

    def __init__(self, settings: Settings) -> None:
        from ray.util import get_node_ip_address

        from workers.remote.channel import Admission, CurvePort, Keys
        from workers.remote.server import DraftServer

        choice = ClusterChoice(settings)
        chosen = choice.read()
        self._spec = engine_spec(with_choice(settings, chosen))
        self._device = device_of(settings, settings.drafter_num_gpus)
        self._server = DraftServer()
        self._take_up(self._load(self._spec.draft_model))
        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        self._admission = Admission()
        self._port = CurvePort(host, Keys.generate(), self._admission)
        self._report = DrafterReport(time.monotonic())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="draftree-drafter", daemon=True)
        self._thread.start()
        self._exchange = Exchange(self._spec.draft_model, choice, chosen, self._load, self._take_up)
        self._exchange.start()
        log.info("drafting with %s at %s", self._spec.draft_model, self._port.contact.address)

    async def check_draft_model(self, draft_model: str) -> str:
        """Why it could not guess here, in a sentence; "" if it could."""
        return await self._exchange.check(draft_model)

    async def take_up_draft_model(self, draft_model: str, number: str) -> str:
        """As `check_draft_model`, and lets it guess if it can."""
        return await self._exchange.take_up(draft_model, number)

    async def introduce(self, public_key: str) -> Contact:
        """Lets the verifier with this key in; returns where to turn to, and the key that proves this drafter."""
        self._admission.admit(public_key)
        return self._port.contact

    async def num_sessions(self) -> int:
        """Of texts that are kept here for verifiers."""
        return self._server.num_sessions

    def stop(self) -> None:
        """Returns when the round in progress is over."""
        self._stopping.set()
        self._thread.join()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's policy goes by (`deployments.autoscaling`)."""
        server = self._server
        return self._report(time.monotonic(), server.busy_s, server.hurried, server.asked)

    def check_health(self) -> None:
        """
        Raises:
            DraftreeError: the server drafts no more.
        """
        if not self._thread.is_alive() or not self._port.alive:
            raise DraftreeError("the draft server has failed; the log says why")
        silent_s = time.monotonic() - self._server.beat
        if silent_s > STALL_S:
            raise DraftreeError(f"the draft server has been busy with one round for {silent_s:.0f} seconds")

    def _load(self, draft_model: str) -> list[tuple[NetworkDraft, Terms]]:
        """Its network; none if nothing of it runs here."""
        model = locate_model(self._spec.model)
        target = Checkpoint.open(model).config
        if remote_part(draft_model, target) is None:
            return []
        config = self._spec.engine_config(target)
        return [
            load_network(
                draft_model,
                model,
                self._spec.draft_options,
                num_pages=config.num_pages,
                page_size=config.page_size,
                device=self._device,
            )
        ]

    def _take_up(self, loaded: list[tuple[NetworkDraft, Terms]]) -> None:
        for drafter, terms in loaded:
            self._server.take_up(drafter, terms)

    def _serve(self) -> None:
        try:
            self._server.run(self._port, self._stopping)
        except Exception:
            log.exception("the draft server failed")
        finally:
            self._port.close()
