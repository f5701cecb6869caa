"""Promise 1 on a verifier that is exact by construction: what fails here is an error in the books."""

from __future__ import annotations

import pytest

from tests.fakes import VOCAB_SIZE, FakeVerifier, plain_decoding
from tests.matrix import Case, check, pairwise
from workers.sequence import Request


def decode_plainly(request: Request) -> tuple[int, ...]:
    return plain_decoding(request.prompt_ids, request.sampling, request.max_tokens)


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_ids_are_those_of_plain_decoding(case: Case) -> None:
    check(case, FakeVerifier, decode_plainly, VOCAB_SIZE)
