"""How a verifier finds a drafter: it introduces itself through Ray Serve, once for each connection.

Serve knows which drafters there are and live; so whenever one is lost, asking again is all that it takes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

from workers.remote.channel import Channel, Contact, CurveChannel, Keys

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
TIMEOUT_S = 10.0  # of one introduction; while no drafter lives, Serve lets it wait


class ServeFinder:
    """A `workers.remote.channel.Finder` over the handle of the drafters' deployment.

    The engine's thread asks for channels and must not wait, so introductions run on a thread of their own, which is
    also the only one that the handle is used on: in these replicas it belongs to the event loop of its first call.
    """

    def __init__(self, drafters: DeploymentHandle[Any]) -> None:
        self._drafters = drafters
        self._keys = Keys.generate()
        self._contact: Contact | None = None
        self._asking = False
        self._trouble = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="draftree-rendezvous", daemon=True).start()

    def channel(self) -> Channel | None:
        contact, self._contact = self._contact, None
        if contact is not None:
            return CurveChannel(contact, self._keys)
        if not self._asking:
            self._asking = True
            asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        return None

    async def _ask(self) -> None:
        try:
            answer = self._drafters.introduce.remote(self._keys.public)
            self._contact = Contact(*await asyncio.wait_for(_awaited(answer), TIMEOUT_S))
            self._trouble = ""
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.warning("no drafter can be found, it is tried again: %s", trouble)
            self._trouble = trouble
        finally:
            self._asking = False


async def _awaited(answer: object) -> Contact:
    contact: Contact = await answer  # type: ignore[misc]
    return contact
