"""The engine's settings. Knows what each must be to work at all; whoever loads the verifier reads some of them too."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from drafter.base import DraftLimits
from verifier.device import DeviceName
from verifier.errors import BadSetting

EXACT, TYPICAL = "exact", "typical-lossy"
Acceptance = Literal["exact", "typical-lossy"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is given to work with.

    ``acceptance`` "typical-lossy" is Medusa's rule (`verifier.acceptance.walk_typically`), for comparison. It CHANGES
    THE TEXT of all requests above temperature 0: what they say depends on the trees, so on the drafter and on the other
    requests, and neither the seed nor a replay gives it again.

    Raises:
        BadSetting: a count below one, no room for an answer, more running sequences than rows, since each needs one in
            every step, or a rule of acceptance that does not exist.
    """

    num_pages: int  # of the KV cache
    page_size: int = 16  # tokens
    max_model_len: int = 2048  # tokens of prompt and output together
    max_running: int = 16  # sequences that hold pages at the same time
    max_rows: int = 192  # rows of one step: roots, prompt tokens and, where room remains, guesses
    prefix_cache: bool = True
    tensor_parallel: int = 1  # ranks that share the model
    device: DeviceName = "cpu"  # what it is computed on; auto: not found out yet
    exact: bool = True  # the verifier pads rows so that each is bitwise the same in any batch
    acceptance: Acceptance = "exact"  # whose tokens are said: plain decoding's, or guesses that are likely enough
    limits: DraftLimits = field(default_factory=DraftLimits)  # of requests that bring none
    draft_deadline_s: float = 0.5  # after this a step goes on without its trees
    adaptive: bool = False  # guess only as far as it pays; False: as far as the limits allow
    max_lanes: int = 1  # 2, of use if the drafter works elsewhere: steps under way at a time; adaptive: where it pays
    max_stretch: float = 3.0  # adaptive: how many times longer than without guesses a step may take

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if type(value) is int and value < 1:
                raise BadSetting(setting.name, value, "at least 1")
        if self.max_model_len < 2:
            raise BadSetting("max_model_len", self.max_model_len, "at least 2, a token of prompt and one of output")
        if self.max_running > self.max_rows:
            raise BadSetting("max_running", self.max_running, f"at most max_rows, {self.max_rows}: one row each a step")
        if self.max_lanes > 2:
            raise BadSetting("max_lanes", self.max_lanes, "1 or 2")
        if not self.max_stretch >= 1:
            raise BadSetting("max_stretch", self.max_stretch, "1 or more")
        if self.acceptance not in (EXACT, TYPICAL):
            raise BadSetting("acceptance", self.acceptance, f"{EXACT} or {TYPICAL}")
        if not self.draft_deadline_s > 0:
            raise BadSetting("draft_deadline_s", self.draft_deadline_s, "more than 0 seconds")
