"""A remote drafter in a process of its own on this machine, as the service's is, but without Serve.

Knows processes, and how the two ends get to know one another's keys. Knows no engine.
"""

from __future__ import annotations

import multiprocessing
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from types import TracebackType

from drafter.options import DraftOptions
from verifier.errors import DraftreeError
from workers.remote.channel import Contact, CurveChannel, Keys


@dataclass(frozen=True)
class DrafterJob:
    """What the process drafts with, and for whom."""

    draft_model: str
    model: Path
    num_pages: int  # of the draft cache
    page_size: int
    threads: int
    verifier_key: str  # public


class DraftProcess(AbstractContextManager["DraftProcess"]):
    """A `workers.remote.channel.Finder` whose one drafter it has started; the drafter ends with the context.

    Raises:
        DraftreeError: it could not be started; says why.
    """

    def __init__(self, job: DrafterJob, keys: Keys) -> None:
        self._keys = keys
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_draft, args=(job, sender), name="draftree-drafter", daemon=True)
        self._process.start()
        sender.close()  # so that the child's end is the only one, and closes with it
        try:
            word = receiver.recv()
        except EOFError:
            word = "its process ended"
        if not isinstance(word, Contact):
            raise DraftreeError(f"The drafter could not be started: {word}")
        self._contact = word

    def channel(self) -> CurveChannel:
        return CurveChannel(self._contact, self._keys)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()


def _draft(job: DrafterJob, contact: Connection) -> None:
    """The child's main function; it ends when it is killed, at the latest with its parent."""
    import torch

    from workers.remote.channel import Admission, CurvePort
    from workers.remote.placement import load_network
    from workers.remote.server import DraftServer

    torch.set_num_threads(job.threads)
    try:
        loaded = load_network(
            job.draft_model, job.model, DraftOptions(), num_pages=job.num_pages, page_size=job.page_size
        )
    except DraftreeError as error:
        contact.send(str(error))
        return
    admission = Admission()
    admission.admit(job.verifier_key)
    port = CurvePort("127.0.0.1", Keys.generate(), admission)
    contact.send(port.contact)
    server = DraftServer()
    server.take_up(*loaded)
    server.run(port, Event())
