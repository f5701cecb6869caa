"""What a user may set; what the engine has a default for is not given another one here.

Knows names, types and ranges. Knows no model: whether the values fit one is asked in `deployments.checks`.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self

from click import ClickException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from ray.serve.exceptions import RayServeException

from verifier.device import DeviceName
from workers.build import EngineSpec
from workers.config import Acceptance

SPEC = EngineSpec()  # whose defaults are everybody's


def _printable(text: str) -> str:
    """Python reads a byte of the command line that is no UTF-8 as half of a surrogate pair; Ray can carry none."""
    if not text.isprintable():
        raise PydanticCustomError("text", "printable text")
    return text


Word = Annotated[str, AfterValidator(_printable)]


class RefusedSettings(ClickException, RayServeException):
    """One sentence about settings that cannot work.

    ``serve run`` prints a `ClickException` as that sentence and exits with status 1, before it has started Ray; when an
    app is deployed from a YAML file, the text of a `RayServeException` becomes the app's status message. Any other
    exception would bring a traceback in both places.
    """


class Settings(BaseModel):
    """All settings of the service: ``serve run deployments:app name=value …`` or ``args:`` in a Serve YAML file.

    Values may be strings, as the command line gives them. 0 and "" mean "work it out" where that is said.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    model: Word = SPEC.model
    """Folder, GGUF file or hub id; "": the embedded default model."""
    served_model_name: Word = ""
    """The name clients use; "": the model's own."""
    api_keys: Word = ""
    """File of API keys and their limits (see deployments/keys.py), readable wherever an ingress may run; "": anybody
    may ask."""
    draft_model: Word = SPEC.draft_model
    """Who guesses: none (plain decoding), ngram, eagle3 (the head that comes along), or the folder of a draft network;
    several joined by +; auto: ngram, and eagle3 where a head for the model comes along."""
    max_draft: Annotated[int, Field(ge=0, le=64)] = SPEC.limits.max_draft
    """Draft length: the most tokens of a guess; 0 is plain decoding."""
    draft_top_k: Annotated[int, Field(ge=1, le=16)] = SPEC.limits.draft_top_k
    """Guesses kept at each node of a draft tree."""
    max_nodes: Annotated[int, Field(ge=0, le=128)] = SPEC.limits.max_nodes
    """Guesses in a draft tree altogether."""
    adaptive: bool = SPEC.adaptive
    """Whether to guess only as far as it pays, within these limits; otherwise as far as they allow."""
    max_stretch: Annotated[float, Field(ge=1, le=100)] = SPEC.max_stretch
    """Adaptive: how many times longer than without guesses a step may be expected to take, rare probes and the reading
    of a long prompt apart."""
    draft_growth: Word = SPEC.draft_options.growth
    """Shape of a draft network's trees: dynamic (the likeliest guesses) or static (EAGLE-1's)."""
    draft_threshold: float = SPEC.draft_options.threshold
    """Guesses less likely to be reached are left out; 0: none."""
    draft_decay: float = SPEC.draft_options.decay
    """Factor on a guess's rank for each level it lies deeper; 1: none."""
    draft_noise_ranking: bool = SPEC.draft_options.noise_ranking
    """Whether guesses at temperatures above 0 are ranked with the noise that draws the tokens."""
    draft_layer_ids: Word = ""
    """Layers after which an EAGLE-3 head reads the model's states, as in 2,15,27; "": what the head says."""
    draft_deadline_ms: Annotated[float, Field(gt=0, le=60_000)] = SPEC.draft_deadline_s * 1000
    """After so long a step goes on without the guesses that it asked for."""
    drafter_placement: Literal["local", "remote"] = "local"
    """Where a draft network runs: local (in the verifier) or remote (in a deployment of its own); ngram never moves."""
    drafter_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Remote: how many drafters, at least."""
    drafter_max_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Remote: how many at most, by their load; 0: never more than at least."""
    drafter_num_gpus: Annotated[float, Field(ge=0, le=64)] = 0.0
    """Remote: GPUs that each of them reserves, or a part of one."""
    page_size: Annotated[int, Field(ge=1, le=256)] = SPEC.page_size
    """Tokens in a page of the KV cache."""
    kv_cache_tokens: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Tokens that the KV cache holds; 0: as many as two of the longest requests need."""
    max_model_len: Annotated[int, Field(ge=0)] = SPEC.max_model_len
    """Tokens of prompt and output together; 0: what the model allows, but no more than 8192."""
    max_running: Annotated[int, Field(ge=1, le=1024)] = SPEC.max_running
    """Requests that are decoded at a time; more wait."""
    max_rows: Annotated[int, Field(ge=1, le=4096)] = SPEC.max_rows
    """Rows of one step: prompt tokens, roots and guesses."""
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 64
    """Requests that may wait for those that are decoded; more are told when to come back, with status 429."""
    ingress_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """How many ingresses; several share limits and decisions through one aggregator."""
    prefix_cache: bool = SPEC.prefix_cache
    """Whether requests share the KV of equal prompt beginnings."""
    exact: bool = SPEC.exact
    """Whether a row's result never depends on its neighbours, which has a small price."""
    acceptance: Acceptance = SPEC.acceptance
    """exact: the text is the model's own. typical-lossy: it is not, above temperature 0; for comparison."""
    tensor_parallel: Annotated[int, Field(ge=1)] = SPEC.tensor_parallel
    """Ranks that share the model, each in a process of its own."""
    device: DeviceName = SPEC.device
    """What is computed on: cpu, cuda, or auto, which is cuda for verifiers and drafters that reserve GPUs and cpu for
    those that do not."""
    verifier_num_gpus: Annotated[float, Field(ge=0, le=64)] = 0.0
    """GPUs that each rank reserves, or a part of one; it computes on one of them."""
    verifier_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """How many verifiers, at least; 0: none while nobody asks, so that the first request waits for one to load."""
    verifier_max_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """How many at most, by their load; 0: never more than at least, but one."""
    upscale_delay_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """For how long more replicas must be wanted before they are started."""
    downscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """For how long fewer must be wanted before some are stopped."""
    node_roles: bool = False
    """Whether verifiers and drafters keep to nodes with the label role=verifier or role=drafter (cluster.yaml)."""
    threads: Annotated[int, Field(ge=0, le=1024)] = SPEC.threads
    """Threads of the verifier, all ranks together; 0: one for each physical core."""
    stall_timeout_s: Annotated[float, Field(ge=3, le=3600)] = 30.0
    """A verifier that has work and makes no step for so long is given up, and its requests go on elsewhere. A sign of
    life is given once a second."""
    replica_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """For so long a request waits for a verifier that can take it, as while one is being started."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 25.0
    """A verifier that is to stop has so long for the requests it has; those left then go on elsewhere."""

    @property
    def capacity(self) -> int:
        """Requests that the service holds: decoded by as many verifiers as there may be, and waiting."""
        verifiers = max(1, self.verifier_replicas, self.verifier_max_replicas)
        return verifiers * self.max_running + self.max_waiting

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, which Ray calls with the command line's or the YAML file's arguments.

        Raises:
            RefusedSettings: an unknown name or a wrong value, in one sentence.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise RefusedSettings("; ".join(_in_words(each) for each in error.errors()) + ".") from None


def _in_words(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        wanted = error["msg"].removeprefix("Input should be ")
        return f"setting {name} is {error['input']!r}, but must be {wanted}"
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(Settings.model_fields)}"
    return f"there is no setting {name} ({hint})"
