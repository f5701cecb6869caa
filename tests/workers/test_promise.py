"""Promise 1 on real models in exact mode, where not even a near-tie may flip: tiny random ones, and the default one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tests.matrix import Case, check, full, pairwise
from tests.models import save_tiny_model
from verifier.batch import Segment, StepPlan
from verifier.default_model import default_model_path
from verifier.pool import PagePool
from verifier.sampling import SamplingParams, draw
from verifier.tree import TokenTree
from verifier.verifier import Verifier
from workers.sequence import Request

PAGE_SIZE = 8


@dataclass
class LoadedModel:
    """A loaded model that gives verifiers with pools of any shape, and says what it says plainly."""

    verifier: Verifier
    texts: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.verifier.config.vocab_size

    def create_verifier(self, num_pages: int, page_size: int) -> Verifier:
        """The last page is the one that the books do not know of. Its KV is NaN wherever nothing was written."""
        config = self.verifier.config
        pool = PagePool(
            num_pages + 1,
            page_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        pool.keys.fill_(torch.nan)
        pool.values.fill_(torch.nan)
        return Verifier(self.verifier.model, pool, self.verifier.row_counts, self.verifier.fingerprint)

    def decode_plainly(self, request: Request) -> tuple[int, ...]:
        """By the definition: the whole prompt in one pass, then token by token, in one run of pages."""
        key = (request.prompt_ids, request.sampling)
        if key not in self.texts:
            self.texts[key] = tuple(self._decode(request))
        return self.texts[key]

    def _decode(self, request: Request) -> Iterator[int]:
        pages = tuple(range(self.verifier.pool.num_pages - 1))
        tree, start = TokenTree.chain(request.prompt_ids), 0
        for _ in range(request.max_tokens):
            segment = Segment(start, tree, pages, scored_from=len(tree) - 1)
            logits = self.verifier.forward(StepPlan((segment,))).logits[0][0]
            start += len(tree)
            token = draw(logits, request.sampling, start).token
            yield token
            tree = TokenTree.chain((token,))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    loaded: dict[str, LoadedModel] = {}

    def load_family(family: str) -> LoadedModel:
        if family not in loaded:
            folder = (
                default_model_path()
                if family == "default"
                else save_tiny_model(tmp_path_factory.mktemp(family) / family, family)
            )
            loaded[family] = LoadedModel(Verifier.load(folder, num_pages=128 // PAGE_SIZE, page_size=PAGE_SIZE))
        return loaded[family]

    return load_family


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_ids_are_those_of_plain_decoding(case: Case, load: Callable[[str], LoadedModel]) -> None:
    model = load("smollm2")
    check(case, model.create_verifier, model.decode_plainly, model.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_ids_are_those_of_plain_decoding_in_every_family(
    case: Case, family: str, load: Callable[[str], LoadedModel]
) -> None:
    model = load(family)
    check(case, model.create_verifier, model.decode_plainly, model.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("case", full(), ids=str)
def test_ids_are_those_of_plain_decoding_in_every_case(case: Case, load: Callable[[str], LoadedModel]) -> None:
    model = load("smollm2")
    check(case, model.create_verifier, model.decode_plainly, model.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise()[::2], ids=str)
def test_ids_are_those_of_plain_decoding_on_the_default_model(case: Case, load: Callable[[str], LoadedModel]) -> None:
    """As it is served: half-precision weights, packed where the machine can, and every kernel."""
    model = load("default")
    check(case, model.create_verifier, model.decode_plainly, model.vocab_size)
