"""A checkpoint's chat template: messages in, the text of the prompt out.

Templates are Jinja programs written for transformers, so they get the environment that
transformers gives them: sandboxed and immutable, block lines trimmed, the loop controls, and the
helpers `raise_exception`, `strftime_now` and a `tojson` that leaves HTML alone. Not here: which
file holds the template (tokenizer.py), what a client may send as messages (frontend/request.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.errors import ConfigError, InvalidRequest

DEFAULT = "default"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are just text."""

    tags = {"generation"}  # noqa: RUF012, the base class has it as a plain attribute too

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def templates(written: Any) -> dict[str, str]:
    """By name; tokenizer_config.json has one string, or a list of {name, template}."""
    if not written:
        return {}
    if isinstance(written, str):
        return {DEFAULT: written}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in written}
    except (TypeError, KeyError):
        raise ConfigError(
            "tokenizer_config.json: chat_template must be a string or a list of {name, template}"
        ) from None


def render(
    named: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
) -> str:
    """Raises InvalidRequest when the template refuses the messages."""
    if DEFAULT not in named and len(named) > 1:
        raise InvalidRequest(
            f"this checkpoint has the chat templates {', '.join(sorted(named))} but no default; "
            "send text_input instead of messages"
        )
    source = named.get(DEFAULT) or next(iter(named.values()))
    try:
        return _compiled(source).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True, tools=None, documents=None, **special_tokens,
        )  # fmt: skip
    except Exception as error:  # edge: a template is a foreign program and may raise anything
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InvalidRequest(
            f"messages: the checkpoint's chat template refused them ({reason})"
        ) from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(written: str) -> str:
    return datetime.now().strftime(written)
