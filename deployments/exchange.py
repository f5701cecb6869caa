"""Another draft model while requests run: asked of all replicas, chosen for all, and taken up by each.

First every replica loads it and says whether it could; one that cannot is enough for a refusal, and nothing has
changed. Then the choice is written down in the cluster, and all take it up. Replicas that start later read it there,
and so do those that were not reached. Knows names of draft models. What becomes of running requests the engine knows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from deployments.errors import ApiError, refused
from deployments.settings import Settings
from verifier.errors import DraftreeError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
NAMESPACE = b"draftree"
FOLLOW_S = 2.0  # between two looks at what was chosen
ANSWER_S = 300.0  # for all replicas to load it

Loaded = TypeVar("Loaded")


class Chosen(NamedTuple):
    """A draft model, and which choice it was: the same folder may hold another head by now."""

    draft_model: str
    number: str


class Choice(Protocol):
    """Where the choice is kept. Thread-safe; may block for a moment."""

    def read(self) -> Chosen | None:
        """None: what the settings say."""
        ...

    def write(self, chosen: Chosen) -> None: ...


class ClusterChoice:
    """In the cluster's own store, where Serve keeps its state, too: it lives as long as the cluster does.

    It holds for settings that name the same model and draft model: who deploys another draft model has chosen that one.
    """

    def __init__(self, settings: Settings) -> None:
        self._key = json.dumps([_application(), settings.model, settings.draft_model])

    def read(self) -> Chosen | None:
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_initialized

        if not _internal_kv_initialized():  # type: ignore[no-untyped-call]  # a replica in no cluster, as in tests
            return None
        value = _internal_kv_get(self._key, namespace=NAMESPACE)
        return Chosen(*json.loads(value)) if value else None

    def write(self, chosen: Chosen) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._key, json.dumps(chosen), namespace=NAMESPACE)


def _application() -> str:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return serve.get_replica_context().app_name
    except RayServeException:
        return ""


def with_choice(settings: Settings, chosen: Chosen | None) -> Settings:
    """What a replica starts with."""
    return settings.model_copy(update={"draft_model": chosen.draft_model}) if chosen else settings


class Exchange(Generic[Loaded]):
    """A replica's part. Its methods take as long as loading takes.

    Attributes:
        draft_model: that guesses here.

    Args:
        draft_model: that the replica has started with.
        chosen: the choice that this was, if it was one.
        load: finds and loads a draft model by name; raises if that cannot be.
        take_up: lets it guess from now on.
    """

    def __init__(
        self,
        draft_model: str,
        choice: Choice,
        chosen: Chosen | None,
        load: Callable[[str], Loaded],
        take_up: Callable[[Loaded], None],
    ) -> None:
        self.draft_model = draft_model
        self._choice, self._load, self._take_up = choice, load, take_up
        self._done = chosen  # taken up, or refused
        self._changing = threading.Lock()

    async def check(self, draft_model: str) -> str:
        """Why it cannot be taken up here, in a sentence; "" if it can."""
        _, why = await asyncio.to_thread(self._try, draft_model)
        return why

    async def take_up(self, draft_model: str, number: str) -> str:
        """As `check`, and takes it up if it can be."""
        return await asyncio.to_thread(self._change, Chosen(draft_model, number))

    def follow(self) -> None:
        """Takes up what was chosen since, whoever chose it; a choice that is refused stays so."""
        chosen = self._choice.read()
        if chosen and chosen != self._done:
            self._change(chosen)

    def start(self) -> None:
        """Follows from now on."""
        threading.Thread(target=self._keep_following, name="draftree-exchange", daemon=True).start()

    def _change(self, chosen: Chosen) -> str:
        with self._changing:
            if chosen == self._done:
                return ""
            loaded, why = self._try(chosen.draft_model)
            self._done = chosen
            if loaded is None:
                log.error("the draft model stays as it is: %s", why)
                return why
            self._take_up(loaded)
            self.draft_model = chosen.draft_model
            log.info("drafting with %s from now on", chosen.draft_model)
            return ""

    def _try(self, draft_model: str) -> tuple[Loaded | None, str]:
        try:
            return self._load(draft_model), ""
        except DraftreeError as error:
            return None, str(error)
        except Exception as error:
            log.exception("draft model %s cannot be loaded", draft_model)
            return None, f"{draft_model} cannot be loaded: {type(error).__name__}: {error}"

    def _keep_following(self) -> None:
        pause = threading.Event()
        while not pause.wait(FOLLOW_S):
            try:
                self.follow()
            except Exception:  # the store is away: what serves, serves on
                log.debug("what was chosen cannot be read", exc_info=True)


class FleetExchange:
    """All replicas, from the ingress.

    Args:
        drafters: None where draft networks run in the verifiers.
    """

    def __init__(
        self, verifiers: DeploymentHandle[Any], drafters: DeploymentHandle[Any] | None, choice: Choice
    ) -> None:
        # Drafters first: they serve verifiers with the last one as well as those with the next one.
        self._fleets = [drafters, verifiers] if drafters else [verifiers]
        self._choice = choice

    async def __call__(self, draft_model: str) -> int:
        """Lets ``draft_model`` guess from now on; returns how many replicas it does so in.

        Raises:
            ApiError: a replica cannot take it up (400; nothing has changed), or no verifier is there to ask (503).
        """
        for fleet in self._fleets:
            answers = await _ask(fleet, "check_draft_model", draft_model)
            if why := next(filter(None, answers), None):
                raise refused("draft_model", why)
            if not answers:
                raise ApiError(503, "No replica is there that could take it up; try again.", code="unavailable")
        chosen = Chosen(draft_model, uuid.uuid4().hex)
        await asyncio.to_thread(self._choice.write, chosen)
        answers = [why for fleet in self._fleets for why in await _ask(fleet, "take_up_draft_model", *chosen)]
        return answers.count("")


async def _ask(fleet: DeploymentHandle[Any], method: str, *arguments: str) -> Sequence[str]:
    answers: Sequence[str] = await fleet.broadcast(method, *arguments).results_async(timeout_s=ANSWER_S)
    return answers
