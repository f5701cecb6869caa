"""How close the choice was where a text parted from another one: a near-tie, or a fault?

Decodes the question plainly, in this process and on one rank. Imports torch only to do so.
"""

from __future__ import annotations

from pathlib import Path

from deployments.chaos.load import MAX_TOKENS, Question
from verifier.sampling import Draw, SamplingParams
from workers.text import Text

PAGE_SIZE, NUM_PAGES = 16, 64
HELD_BACK = 3  # bytes of a character that wait for its last one


def gap(model: Path, question: Question, text: str) -> float | None:
    """Between the best and the next best of log p + noise, where ``text`` begins to differ from plain decoding's.

    Where bytes of a character were held back, the closest of these choices counts. None: it does not differ.
    """
    detokenizer = Text.load(model).detokenizer(continues=True)
    draws = decode(model, question)
    plain = ""
    for index, draw in enumerate(draws):
        plain += detokenizer.push([draw.token])
        if not text.startswith(plain):
            return min(draw.margin for draw in draws[max(0, index - HELD_BACK) : index + 1])
    return None


def decode(model: Path, question: Question) -> list[Draw]:
    """All tokens of the answer, one after the other."""
    from verifier.batch import Segment, StepPlan
    from verifier.sampling import draw
    from verifier.tree import TokenTree
    from verifier.verifier import Verifier

    verifier = Verifier.load(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    sampling = SamplingParams(temperature=question.temperature, seed=question.number)
    pages = tuple(range(NUM_PAGES - 1))
    rows, start, draws = Text.load(model).encode(question.prompt), 0, list[Draw]()
    while len(draws) < MAX_TOKENS:
        segment = Segment(start, TokenTree.chain(rows), pages, scored_from=len(rows) - 1)
        logits = verifier.forward(StepPlan((segment,))).logits[0][-1]
        start += len(rows)
        draws.append(draw(logits, sampling, start))
        rows = [draws[-1].token]
    return draws
