"""The default model's greedy answers, against those of `transformers` that are stored beside this file.

`python -m tests.workers.measuring.test_compare` makes the file anew: the first tokens that `transformers` 5 generates
in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from verifier.sampling import SamplingParams
from workers.build import EngineSpec, build_engine, locate_model
from workers.measuring.compare import NEAR_TIE, first_parting, transformers_answer
from workers.measuring.prompts import PROMPTS, read_prompts
from workers.sequence import Request
from workers.text import Text

STORED = Path(__file__).with_name("greedy_answers.json")
NUM_TOKENS = 32


def test_the_first_parting_is_told_with_its_gap() -> None:
    logits = [torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 2.5])]
    assert first_parting(0, [2, 2], [2, 2], logits) is None
    parting = first_parting(7, [2, 1], [2, 2], logits)
    assert parting is not None
    assert (parting.prompt, parting.position, parting.ours, parting.theirs) == (7, 1, 1, 2)
    assert parting.gap == pytest.approx(0.5)
    assert parting.gap > NEAR_TIE


def test_an_answer_that_stops_short_is_no_agreement() -> None:
    with pytest.raises(AssertionError, match="1 tokens against 2"):
        first_parting(0, [2], [2, 2], [torch.zeros(3), torch.zeros(3)])


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_the_default_model_says_what_transformers_says(exact: bool) -> None:
    engine, _ = build_engine(EngineSpec(max_model_len=512, exact=exact))
    stored = json.loads(STORED.read_text())
    requests = [
        Request(str(i), tuple(each["prompt_ids"]), SamplingParams(temperature=0), len(each["answer_ids"]))
        for i, each in enumerate(stored)
    ]
    for result, each in zip(engine.run(requests), stored, strict=True):
        assert list(result.output_ids) == each["answer_ids"]


def store() -> None:
    from transformers import AutoModelForCausalLM

    folder = locate_model("")
    text, model = Text.load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = []
    for prompt in read_prompts(PROMPTS, 12):
        ids = text.chat_ids([{"role": "user", "content": prompt.text}])
        answer, logits = transformers_answer(model, ids, NUM_TOKENS)
        gaps = [float(best[0] - best[1]) for best in (each.topk(2).values for each in logits)]
        assert min(gaps) > NEAR_TIE, "a near-tie is no test: leave this prompt out"
        stored.append({"prompt_ids": list(ids), "answer_ids": answer})
    STORED.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    store()
