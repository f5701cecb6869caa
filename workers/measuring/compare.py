"""Whether this engine says what `transformers` says: greedy decoding of a file of prompts, token by token.

    python -m workers.measuring.compare --prompts FILE [--count 60] [--max-tokens 64] [--draft-model ngram]

Both sides compute with the same weights, `transformers` in fp32 and one prompt at a time. Where the two part, the gap
between the two best logits of `transformers` tells a near-tie (two kernels sum in different orders) from a fault.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drafter.command_line import OneLineParser
from verifier.sampling import SamplingParams
from workers.build import EngineSpec, build_engine, locate_model
from workers.measuring.command import add_prompts, as_command
from workers.measuring.prompts import read_prompts
from workers.sequence import Request

NEAR_TIE = 1e-3  # logits; a larger gap where two answers part is a fault


@dataclass(frozen=True)
class Parting:
    """The first token at which two answers differ."""

    prompt: int
    position: int  # in the answer
    ours: int
    theirs: int
    gap: float  # between the two best logits there


def first_parting(
    prompt: int, ours: Sequence[int], theirs: Sequence[int], logits: Sequence[torch.Tensor]
) -> Parting | None:
    """``logits[i]`` ``[vocab]`` is what token i of ``theirs`` was chosen from."""
    for position, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            best = logits[position].topk(2).values
            return Parting(prompt, position, our, their, float(best[0] - best[1]))
    assert len(ours) == len(theirs), f"prompt {prompt}: {len(ours)} tokens against {len(theirs)}"
    return None


@torch.inference_mode()
def transformers_answer(model: Any, ids: Sequence[int], max_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy answer ids and the logits ``[vocab]`` that each was chosen from."""
    output = model.generate(
        torch.tensor([list(ids)]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0, len(ids) :].tolist(), [step[0] for step in output.logits]


def compare(spec: EngineSpec, prompts: Sequence[str], max_tokens: int) -> Iterator[tuple[int, Parting | None]]:
    """For each prompt its answer's length in tokens, and where the two answers part."""
    engine, text = build_engine(spec)
    reference = AutoModelForCausalLM.from_pretrained(locate_model(spec.model), dtype=torch.float32)
    stop_ids = frozenset(engine.verifier.config.eos_token_ids)
    asked = [text.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
    requests = [
        Request(str(index), tuple(ids), SamplingParams(temperature=0), max_tokens, stop_ids)
        for index, ids in enumerate(asked)
    ]
    answers = engine.run(requests)
    for index, (ids, answer) in enumerate(zip(asked, answers, strict=True)):
        theirs, logits = transformers_answer(reference, ids, max_tokens)
        yield len(theirs), first_parting(index, answer.output_ids, theirs, logits)


def run(options: argparse.Namespace) -> dict[str, int]:
    spec = EngineSpec(model=options.model, draft_model=options.draft_model, exact=options.exact)
    prompts = [prompt.text for prompt in read_prompts(options.prompts, options.count)]
    num_tokens, partings = 0, []
    for length, parting in compare(spec, prompts, options.max_tokens):
        num_tokens += length
        if parting is not None:
            partings.append(parting)
            print(
                f"prompt {parting.prompt} parts at token {parting.position}: {parting.ours} here, {parting.theirs} in "
                f"transformers, whose two best logits there are {parting.gap:.2e} apart"
            )
    faults = sum(parting.gap > NEAR_TIE for parting in partings)
    near_ties = len(partings) - faults
    print(f"{len(prompts)} prompts, {num_tokens} tokens: {near_ties} near-ties, {faults} faults")
    return {"prompts": len(prompts), "tokens": num_tokens, "near_ties": near_ties, "faults": faults}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 when an answer parts by more than a near-tie."""
    options = command_line().parse_args(arguments)
    figures: dict[str, int] = {}

    def measure() -> dict[str, int]:
        figures.update(run(options))
        return figures

    return as_command("compare", measure) or int(figures["faults"] > 0)


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m workers.measuring.compare",
        description="Compares greedy answers with those of transformers, token by token.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_prompts(parser, count=60, max_tokens=64)
    add("--model", default="", metavar="M", help="folder or hub id (default: the embedded model)")
    add("--draft-model", default="ngram", metavar="D", help="who guesses here (default: %(default)s)")
    add("--no-exact", dest="exact", action="store_false", help="without exact mode")
    return parser


if __name__ == "__main__":
    sys.exit(main())
