"""Trained EAGLE-3 heads as folders: in our own layout, in SafeAILab's, and in that of the speculators library.

Ours is SafeAILab's names in a safetensors file, and a config that says which layers are read. vLLM loads the
speculators layout as ``eagle3``. Knows names and config keys; `drafter.head_config` says what they mean, and reads all
three. All flags are written out, since loaders differ in what they take a missing one to mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.training.layouts import decoder_words, halves, save_config, save_weights
from drafter.training.objectives.factory import head_decoder
from drafter.training.trained import Trained
from verifier.config import ARCHITECTURES
from verifier.errors import BadSetting

FLAGS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
GUESSES = 3  # the speculators layout names a number of draft tokens; who serves the head may choose another


def save_draftree(folder: Path, head: Trained) -> None:
    """``config.json`` and ``model.safetensors``, fp16."""
    save_config(folder, _plain_config(head, "LlamaForCausalLMEagle3") | _layer_ids(head) | FLAGS)
    save_weights(folder, _tensors(head))


def save_safeailab(folder: Path, head: Trained) -> None:
    """``config.json`` and ``pytorch_model.bin``, fp16, as the published heads of EAGLE's authors.

    Raises:
        BadSetting: the head reads other layers than their code, which knows no others.
    """
    last = head.target.config.num_layers
    theirs = (2, last // 2, last - 3)
    if head.layer_ids != theirs:
        allowed = f"another: SafeAILab's code reads layers {list(theirs)} alone, this head {list(head.layer_ids)}"
        raise BadSetting("layout", "safeailab", allowed)
    save_config(folder, _plain_config(head, "LlamaForCausalLM"))
    torch.save(_tensors(head), folder / "pytorch_model.bin")


def save_speculators(folder: Path, head: Trained) -> None:
    """``config.json`` and ``model.safetensors``, fp16; with the target's embedding, as that library saves it."""
    target = head.target.config
    architectures = [name for name, family in ARCHITECTURES.items() if family == target.architecture]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": GUESSES,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(head.target_ids),
        "target_hidden_size": None,  # the same
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformer_layer_config": _plain_config(head, "LlamaForCausalLM", draft_vocab=False),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": architectures},
        },
    }
    save_config(folder, config | _layer_ids(head) | FLAGS)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _tensors(head).items()}
    tensors["embed_tokens.weight"] = head.target.embedding.half().contiguous()
    save_weights(folder, tensors)


def _tensors(head: Trained) -> dict[str, Tensor]:
    """Weights as fp16, and the maps between the vocabularies (SafeAILab: offsets, and a mask of the target's ids)."""
    vocab_size = head.target.config.vocab_size
    tensors = halves(head.weights)
    tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, head.target_ids, True)
    return tensors


def _layer_ids(head: Trained) -> dict[str, Any]:
    """At the top level these are boundary ids, for our loader as for vLLM; the number of them is vLLM's own wish."""
    return {
        "eagle_aux_hidden_state_layer_ids": list(head.layer_ids),
        "num_aux_hidden_states": len(head.layer_ids),
    }


def _plain_config(head: Trained, architecture: str, *, draft_vocab: bool = True) -> dict[str, Any]:
    """The head's one layer in Hugging Face's words."""
    words = decoder_words(head_decoder(head.settings, head.target.config))
    draft = {"draft_vocab_size": len(head.target_ids)} if draft_vocab else {}
    return {"architectures": [architecture]} | words | draft
