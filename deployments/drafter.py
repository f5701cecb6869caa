"""The drafter's deployment: a draft server on its own thread, and the door where verifiers introduce themselves.

What verifiers and drafters have to say to one another in every step goes over a channel of theirs, not through here.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from deployments.autoscaling import DrafterReport
from deployments.checks import engine_spec
from deployments.settings import Settings
from verifier.errors import DraftreeError
from verifier.weights import Checkpoint
from workers.build import locate_model
from workers.remote.placement import load_draft_server

if TYPE_CHECKING:
    from workers.remote.channel import Contact

log = logging.getLogger("ray.serve")
STALL_S = 30.0  # without a round in this time, the server is given up for lost; it makes one a second when idle


class DrafterReplica:
    """Loads the draft network, and of the model what that shares with it, and drafts for all verifiers that ask."""

    def __init__(self, settings: Settings) -> None:
        from ray.util import get_node_ip_address

        from workers.remote.channel import Admission, CurvePort, Keys

        spec = engine_spec(settings)
        model = locate_model(spec.model)
        config = spec.engine_config(Checkpoint.open(model).config)
        self._server = load_draft_server(
            spec.draft_model, model, spec.draft_options, num_pages=config.num_pages, page_size=config.page_size
        )
        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        self._admission = Admission()
        self._port = CurvePort(host, Keys.generate(), self._admission)
        self._report = DrafterReport(time.monotonic())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="draftree-drafter", daemon=True)
        self._thread.start()
        log.info("drafting with %s at %s", spec.draft_model, self._port.contact.address)

    async def introduce(self, public_key: str) -> Contact:
        """Lets the verifier with this key in; returns where to turn to, and the key that proves this drafter."""
        self._admission.admit(public_key)
        return self._port.contact

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

    def _serve(self) -> None:
        try:
            self._server.run(self._port, self._stopping)
        except Exception:
            log.exception("the draft server failed")
        finally:
            self._port.close()
