"""Chat messages as the one text that a model was trained on: its own Jinja template.

Templates come with checkpoints, so they run in Jinja's sandbox. The environment is the one that templates are written
for (transformers' ``apply_chat_template``), without the import of transformers, which takes seconds and brings torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verifier.errors import BadRequest


class ChatTemplate:
    """``marks`` are the special tokens that a template may name: ``bos_token`` and its like."""

    def __init__(self, source: str, marks: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._marks = dict(marks)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises:
            BadRequest: the template does not take these messages; it says why.
        """
        try:
            return self._template.render(
                **self._marks, messages=list(messages), tools=None, documents=None, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise BadRequest("messages", roles, f"what the model's chat template takes ({error})") from error


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _raise, "strftime_now": _now}
    environment.globals.update(functions)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this one escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
