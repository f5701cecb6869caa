"""The engine's settings. Knows what each must be to work at all; whoever loads the verifier reads some of them too."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from drafter.base import DraftLimits
from verifier.errors import BadSetting


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is given to work with.

    Raises:
        BadSetting: a count below one, no room for an answer, or more running sequences than rows, since each needs one
            in every step.
    """

    num_pages: int  # of the KV cache
    page_size: int = 16  # tokens
    max_model_len: int = 2048  # tokens of prompt and output together
    max_running: int = 16  # sequences that hold pages at the same time
    max_rows: int = 192  # rows of one step: roots, prompt tokens and, where room remains, guesses
    prefix_cache: bool = True
    tensor_parallel: int = 1  # ranks that share the model
    exact: bool = True  # the verifier pads rows so that each is bitwise the same in any batch
    limits: DraftLimits = field(default_factory=DraftLimits)  # of requests that bring none
    draft_deadline_s: float = 0.5  # after this a step goes on without its trees

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if type(value) is int and value < 1:
                raise BadSetting(setting.name, value, "at least 1")
        if self.max_model_len < 2:
            raise BadSetting("max_model_len", self.max_model_len, "at least 2, a token of prompt and one of output")
        if self.max_running > self.max_rows:
            raise BadSetting("max_running", self.max_running, f"at most max_rows, {self.max_rows}: one row each a step")
        if not self.draft_deadline_s > 0:
            raise BadSetting("draft_deadline_s", self.draft_deadline_s, "more than 0 seconds")
