"""How a drafter that is a network goes about it, where that is the user's choice. Knows names and ranges alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

from verifier.errors import BadSetting

GROWTHS = ("dynamic", "static")


@dataclass(frozen=True)
class DraftOptions:
    """
    Raises:
        BadSetting: a value out of range, or one that would have no effect beside another; by the setting's name, which
            is the field's after ``draft_``.
    """

    growth: str = "dynamic"  # trees: the likeliest nodes (EAGLE-2, EAGLE-3), or EAGLE-1's fixed shape
    threshold: float = 0.0  # dynamic: guesses less likely to be reached are left out; 0: none
    decay: float = 1.0  # dynamic: factor on a node's rank for each level it lies deeper; 1: none
    noise_ranking: bool = True  # above temperature 0: rank by what the target's noise favours
    layer_ids: tuple[int, ...] = ()  # EAGLE-3: boundary ids of the layers it reads; empty: what its config says

    def __post_init__(self) -> None:
        if self.growth not in GROWTHS:
            raise BadSetting("draft_growth", self.growth, f"one of: {', '.join(GROWTHS)}")
        if not 0 <= self.threshold < 1:
            raise BadSetting("draft_threshold", self.threshold, "a probability below 1; 0 for none")
        if not 0 < self.decay <= 1:
            raise BadSetting("draft_decay", self.decay, "above 0 and at most 1, which is none")
        if self.growth == "static":
            self.refuse("threshold", "decay", because="draft_growth is static and ranks nothing")

    def refuse_all(self, because: str) -> None:
        """
        Raises:
            BadSetting: anything is set, and has no use.
        """
        self.refuse(*(field.name for field in fields(self)), because=because)

    def refuse(self, *names: str, because: str) -> None:
        """
        Raises:
            BadSetting: one of these fields is set, and has no use.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise BadSetting(f"draft_{field.name}", value, f"left out, since {because}")


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """
    Args:
        text: as ``2,15,27``; empty for none.

    Raises:
        BadSetting: it is not of that form.
    """
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise BadSetting("draft_layer_ids", text, "numbers of layers with commas between, as in 2,15,27") from None
