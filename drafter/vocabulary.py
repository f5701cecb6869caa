"""Whether a draft network speaks the target's language: equal tokenizers, and the map of a smaller vocabulary.

Knows ids and tokenizer files. Knows no network.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.head_config import HeadConfig
from verifier.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER = "tokenizer.json"
# Words, capitals, digits, runs of spaces, code, accents, another script, an emoji: what tokenizers split differently.
PROBE = 'The quick brown Foxes paid 1,234.50 €\n\n    def f(x): return x**2  # "naïve"\tStraße 你好 👋🏽'

logger = logging.getLogger(__name__)


def check_tokenizer(folder: Path, model: Path, name: str, target: str) -> None:
    """Whether both turn a text into the same ids, where both have a ``tokenizer.json``.

    Args:
        folder, name: the draft network's.
        model, target: the target's folder or GGUF file, and name.

    Raises:
        CheckpointError: they do not.
    """
    own, theirs = folder / TOKENIZER, (model.parent if model.is_file() else model) / TOKENIZER
    if own.is_file() and theirs.is_file() and _probe(own) != _probe(theirs):
        raise CheckpointError(f"{name} has another tokenizer than {target}: the same text gives other token ids.")


def _probe(path: Path) -> list[int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    ids: list[int] = tokenizer.encode(PROBE, add_special_tokens=False).ids
    return ids


def read_map(d2t: Tensor | None, t2d: Tensor | None, config: HeadConfig, name: str) -> Tensor:
    """Target ids ``[draft vocabulary]`` int64 from the stored offsets ``d2t`` and the mask ``t2d``.

    ``d2t[i]`` is what is added to draft id i. A head over the target's whole vocabulary needs no map; ids that pad it
    beyond the target's are left out.

    Raises:
        CheckpointError: a map is missing, or does not lead to different target ids in ascending order.
    """
    import torch

    size, num_ids = config.draft_vocab_size, config.target_vocab_size
    own = torch.arange(size)
    if config.maps_all:
        return own[:num_ids]
    if d2t is None:
        raise CheckpointError(f"{name} lacks d2t, the map of its {size} draft ids to the target's {num_ids}.")
    if d2t.shape != (size,):
        raise CheckpointError(f"{name}: d2t has shape {list(d2t.shape)}, but must have [{size}].")
    offsets = d2t.long()
    if not offsets.any():
        raise CheckpointError(f"{name}: d2t is all zeros, so the map of its draft vocabulary was never saved.")
    if _is_absolute(offsets, t2d, num_ids):
        logger.warning("%s: d2t holds target ids rather than offsets; it is read as such.", name)
        offsets = offsets - own
    ids = own + offsets
    _first(offsets < 0, f"{name}: d2t[{{}}] is negative, but offsets begin at 0 and never fall.")
    _first(ids >= num_ids, f"{name}: d2t[{{}}] leads beyond the target's {num_ids} token ids.")
    _first(ids.diff(prepend=ids.new_tensor([-1])) <= 0, f"{name}: d2t[{{}}] leads to a token id that is not new.")
    if t2d is not None:
        _check_mask(t2d, ids, config, name)
    return ids


def _is_absolute(d2t: Tensor, t2d: Tensor | None, num_ids: int) -> bool:
    """Whether these can only be ids: ascending ones that as offsets would lead out, and that t2d marks."""
    ascending = bool((d2t.diff() > 0).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < num_ids
    leads_out = int(d2t[-1]) + len(d2t) - 1 >= num_ids
    return ascending and leads_out and t2d is not None and len(t2d) > int(d2t[-1]) and bool(t2d[d2t].bool().all())


def _check_mask(t2d: Tensor, ids: Tensor, config: HeadConfig, name: str) -> None:
    if t2d.dim() != 1 or len(t2d) not in (config.vocab_size, config.target_vocab_size):
        raise CheckpointError(f"{name}: t2d has shape {list(t2d.shape)}, but must have [{config.vocab_size}].")
    _first(ids >= len(t2d), f"{name}: d2t[{{}}] leads beyond t2d.")
    _first(~t2d.bool()[ids], f"{name}: d2t[{{}}] leads to a token id that t2d says is not in the draft vocabulary.")
    marked = int(t2d.bool().sum())
    if marked != len(ids):
        raise CheckpointError(f"{name}: t2d marks {marked} token ids, but the draft vocabulary has {len(ids)}.")


def _first(wrong: Tensor, sentence: str) -> None:
    """Raises ``sentence`` with the first index at which ``wrong [n]`` is true."""
    if wrong.any():
        raise CheckpointError(sentence.format(int(wrong.int().argmax())))
