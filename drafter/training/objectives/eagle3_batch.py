"""Batches for EAGLE-3 with training-time test: which slots are computed, which are trained on, who attends to whom.

Slot i pairs the target's feature of position i with token i + 1 and predicts token i + 2; step j of a slot predicts
token i + 2 + j from what the steps before made of it. Rows are flat, so that linear layers see no padding; attention
alone takes them by conversation. Knows indices, no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafter.training.shards import Conversation


@dataclass(frozen=True)
class Step:
    """The rows of one step: the slots that go on guessing. Each step's are a part of the step's before it."""

    slots: Tensor  # [rows] into the batch's slots
    parents: Tensor  # [rows] into the rows of the step before
    ahead: Tensor  # [rows] into the rows of step 0: the slot that stands as many places on as there were steps
    owners: Tensor  # [rows] the conversation of each row, ascending
    num_places: int  # rows, and those that the draft vocabulary has cut off

    def following(self, computed: Tensor, going: Tensor) -> tuple[Step, Tensor]:
        """The step with those rows alone whose parents go on, and a mask of them.

        Args:
            computed: ``[rows of the step before]`` bool: those that were computed, which parents then count alone.
            going: those that go on, likewise; a part of them.
        """
        keep = going[self.parents]
        parents = (computed.cumsum(0) - 1)[self.parents[keep]]
        return replace(
            self, slots=self.slots[keep], parents=parents, ahead=self.ahead[keep], owners=self.owners[keep]
        ), keep


@dataclass(frozen=True)
class Batch:
    """Some conversations. Slots are those up to the last that is trained on; rows those that are."""

    features: Tensor  # [slots, taps * H] float16
    tokens: Tensor  # [slots] int64
    positions: Tensor  # [slots] int64
    owners: Tensor  # [slots] the conversation of each slot, ascending
    steps: Sequence[Step]
    last: Tensor  # [rows of step 0, H] float16: the target's state that predicts what the row predicts
    labels: Tensor  # [rows of step 0] int64: the written token, as draft id
    num_conversations: int


@dataclass(frozen=True)
class _Part:
    """One conversation's slots by step."""

    conversation: Conversation
    alive: list[Tensor]  # by step, slots that are trained on
    num_places: list[int]

    @property
    def num_slots(self) -> int:
        return int(self.alive[0][-1]) + 1


def trained_slots(ids: Tensor, mask: Tensor, draft_ids: Tensor, num_steps: int) -> tuple[list[Tensor], list[int]]:
    """By step, the slots trained on, and how many places there were.

    A place is a slot whose token and whose guesses so far are all of one answer: the root of a draft is a token that
    the target wrote. A slot is trained on as long as all tokens to be guessed are in the draft vocabulary, since below
    another no tree ever goes.
    """
    mask = mask.bool()
    known = draft_ids[ids.long()] >= 0
    place = alive = mask[1:]
    slots, num_places = [], []
    for step in range(num_steps):
        place = place[:-1] & mask[2 + step :]
        alive = alive[:-1] & mask[2 + step :] & known[2 + step :]
        slots.append(alive.nonzero()[:, 0])
        num_places.append(int(place.sum()))
    return slots, num_places


def make_batch(conversations: Sequence[Conversation], draft_ids: Tensor, num_steps: int, device: torch.device) -> Batch:
    """Of conversations that all have something to train on."""
    parts = [_Part(each, *trained_slots(each.ids, each.mask, draft_ids, num_steps)) for each in conversations]
    ids = [part.conversation.ids.long() for part in parts]
    sizes = [part.num_slots for part in parts]
    offsets = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
    rows = [part.alive[0] for part in parts]

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).to(device)

    return Batch(
        features=joined([part.conversation.features[: part.num_slots] for part in parts]),
        tokens=joined([each[1 : size + 1] for each, size in zip(ids, sizes, strict=True)]),
        positions=joined([torch.arange(size) for size in sizes]),
        owners=_owners(sizes).to(device),
        steps=[_step(parts, offsets, step, device) for step in range(num_steps)],
        last=joined([part.conversation.last[slots + 1] for part, slots in zip(parts, rows, strict=True)]),
        labels=joined([draft_ids[each[slots + 2]] for each, slots in zip(ids, rows, strict=True)]),
        num_conversations=len(parts),
    )


def _step(parts: Sequence[_Part], offsets: Sequence[int], step: int, device: torch.device) -> Step:
    """Rows are looked up by slot, and slots are ascending, so a search finds them."""

    def flat(step: int, shift: int = 0) -> Tensor:
        return torch.cat([part.alive[step] + offset + shift for part, offset in zip(parts, offsets, strict=True)])

    slots = flat(step)
    return Step(
        slots=slots.to(device),
        parents=torch.searchsorted(flat(max(step - 1, 0)), slots).to(device),
        ahead=torch.searchsorted(flat(0), flat(step, shift=step)).to(device),
        owners=_owners([len(part.alive[step]) for part in parts]).to(device),
        num_places=sum(part.num_places[step] for part in parts),
    )


def _owners(sizes: Sequence[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def padding(owners: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """``[groups, longest]`` indices of items that lie group after group, and where in it, flattened, each item is.

    Padding repeats item 0.
    """
    sizes = owners.bincount(minlength=num_groups)
    longest = int(sizes.max())
    there = torch.arange(longest, device=owners.device) < sizes.unsqueeze(1)
    unpad = there.flatten().nonzero()[:, 0]
    pad = owners.new_zeros(num_groups * longest)
    pad[unpad] = torch.arange(len(owners), device=owners.device)
    return pad.view(num_groups, longest), unpad
