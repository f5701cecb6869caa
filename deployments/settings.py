"""What a user may set, with every default written once.

Knows names, types and ranges. Knows no model: whether the values fit one is asked in `deployments.checks`.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal, Self

from click import ClickException
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from ray.serve.exceptions import RayServeException


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

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field("", description="folder, GGUF file or hub id; empty: the embedded default model")
    served_model_name: str = Field("", description="the name clients use; empty: the model's own")
    draft_model: Literal["none", "ngram"] = Field("ngram", description="who guesses; none is plain decoding")
    max_draft: int = Field(7, ge=0, le=64, description="draft length: a guess's tokens, at most; 0 is plain decoding")
    draft_top_k: int = Field(2, ge=1, le=16, description="guesses kept at each node of a draft tree")
    max_nodes: int = Field(7, ge=0, le=128, description="guesses in a draft tree altogether")
    page_size: int = Field(16, ge=1, le=256, description="tokens in a page of the KV cache")
    kv_cache_tokens: int = Field(0, ge=0, description="tokens the KV cache holds; 0: two of the longest requests")
    max_model_len: int = Field(0, ge=0, description="tokens of prompt and output; 0: the model's limit, at most 8192")
    max_running: int = Field(16, ge=1, le=1024, description="requests that are decoded at a time; more wait")
    max_rows: int = Field(96, ge=1, le=4096, description="rows of one forward pass: prompt tokens, roots and guesses")
    prefix_cache: bool = Field(True, description="whether requests share the KV of equal prompt beginnings")
    exact: bool = Field(True, description="whether a row's result never depends on its neighbours, at a small price")
    tensor_parallel: int = Field(1, ge=1, description="ranks that share the model")
    threads: int = Field(0, ge=0, le=1024, description="threads of the verifier; 0: one for each physical core")

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
