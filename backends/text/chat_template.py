"""A checkpoint's chat template: renders messages as the text of the prompt.

Templates are Jinja programs written for transformers, so they get the environment that transformers
has. It is sandboxed and immutable, trims block lines, and has `break` and `continue`. Its helpers
are `raise_exception`, `strftime_now` and a `tojson` that does not escape HTML.

A template reads the content of a message as a string, or as a list of parts
(`{% for part in message.content %}{{ part.text }}`), or accepts both. The wrong form loses the text
without an error. So each template is tried once per role with a known word in both forms. If the
template prints the word in the client's form, the content is not changed. Otherwise the content is
converted to the other form. A template that prints the word in neither form is assumed to read
parts if it loops over `content`, and strings otherwise, as in vLLM.

A template that mentions `tools` gets the tools of the request, and messages with `tool_calls`. The
arguments of a call are an object, or text for a template that fails with an object. Any other
template gets them as text of its messages (tool_calls/prompt.py).

Not here: reading the template's file (tokenizer.py), checking messages (frontend/request.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.errors import ConfigError, InvalidRequest
from backends.text.tool_calls.formats import mentions_tools
from backends.text.tool_calls.prompt import as_plain_messages

# Names of the templates that are used if there are several: for a chat with tools, and otherwise.
TOOL_USE, DEFAULT = "tool_use", "default"
PROBE = "Mooncakeprobe"  # the known word of the trials; a template may change its case
# A template that reads only strings prints a list of parts with quotes and the key "text".
PRINTED_PARTS = re.compile(rf"""['"]text['"]:\s*['"]{PROBE}""", re.IGNORECASE)
ROLES = ("system", "user", "assistant", "tool")  # other roles are tried as `user`
Content = str | list[dict[str, str]] | None  # parts are {"type": "text", "text": ...}
READS_NONE = re.compile(r"content(['\"]\])?\s+is\s+(not\s+)?none", re.IGNORECASE)
# Variables that a request has itself, so that no client sets them.
OWN_VARIABLES = ("messages", "tools", "documents")
# Options of transformers' apply_chat_template: whether the prompt begins a message of the
# assistant, and whether the answer continues the last message.
GENERATION, CONTINUE = "add_generation_prompt", "continue_final_message"
CONTINUED = "Mooncakecontinues"  # marks the end of a message that the answer continues


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012, a plain attribute as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def templates(written: Any) -> dict[str, str]:
    """Templates by name, from one template or a list of {name, template}. Raises ConfigError."""
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


def source_of(named: Mapping[str, str], has_tools: bool = False) -> str:
    """The template for a chat; raises InvalidRequest if there are several and none is a default."""
    if has_tools and TOOL_USE in named:
        return named[TOOL_USE]
    if DEFAULT not in named and len(named) > 1:
        raise InvalidRequest(
            f"this checkpoint has the chat templates {', '.join(sorted(named))} but no default; "
            "send text_input (in OpenAI's interface: /v1/completions) instead of messages"
        )
    return named.get(DEFAULT) or next(iter(named.values()))


def render(
    named: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Render messages with one of the templates `named`. `options`: variables of the template,
    GENERATION and CONTINUE. Raises InvalidRequest if there is no template to choose, or if the
    template fails or prints no text."""
    source, names = source_of(named, bool(tools)), tuple(sorted(special_tokens.items()))
    given = list(messages)
    if mentions_tools(source):
        given = [_with_arguments(source, names, each) for each in given]
    elif tools or any(each.get("tool_calls") for each in given):
        given, tools = as_plain_messages(given, tools), ()
    try:
        converted = [_converted(source, names, each) for each in given]
        prompt = _prompt(source, converted, names, tools, options)
    except Exception as error:  # Catch all: a template is a foreign program and may raise anything
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InvalidRequest(
            f"messages: the checkpoint's chat template rejected them ({reason})"
        ) from None
    if not prompt.strip() and any(_has_text(each["content"]) for each in given):
        raise InvalidRequest("messages: the checkpoint's chat template rendered an empty prompt")
    return prompt


def _prompt(
    source: str,
    messages: list[dict[str, Any]],
    special_tokens: tuple[tuple[str, str], ...],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    variables = {**dict(special_tokens), "documents": None, GENERATION: True, **(options or {})}
    is_continued = variables.pop(CONTINUE, False)
    if is_continued:
        variables[GENERATION] = False
        messages = _marked(messages)
    prompt = _compiled(source).render(
        variables | {"messages": messages, "tools": list(tools) or None}
    )
    if not is_continued:
        return prompt
    kept, mark, _ = prompt.rpartition(CONTINUED)
    if not mark:
        raise InvalidRequest(f"{CONTINUE}: the chat template does not print the last message")
    return kept


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with CONTINUED at the end of the last one's text."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, list):
        content = [*content[:-1], {"type": "text", "text": content[-1]["text"] + CONTINUED}]
    else:
        content = (content or "") + CONTINUED
    return [*before, {**last, "content": content}]


def _with_arguments(
    source: str, special_tokens: tuple[tuple[str, str], ...], message: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The message with the arguments of its calls in a form that the template reads."""
    calls = message.get("tool_calls")
    if not calls or _reads_objects(source, special_tokens):
        return message
    written = []
    for call in calls:
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = _tojson(function["arguments"])
        written.append({**call, "function": function})
    return {**message, "tool_calls": written}


@lru_cache(maxsize=8)
def _reads_objects(source: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether the template renders a call whose arguments are an object."""
    function = {"name": "f", "arguments": {"a": 1}}
    call = {"id": "callcall0", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": call["id"], "name": "f"},
    ]
    try:
        converted = [_converted(source, special_tokens, each) for each in messages]
        prompt = _prompt(source, converted, special_tokens)
    except TypeError:
        return False
    except Exception:  # Catch all: a template may reject the probe for another reason
        return True
    return str(function["arguments"]) not in prompt  # printed as Python writes an object


def _converted(
    source: str, special_tokens: tuple[tuple[str, str], ...], message: Mapping[str, Any]
) -> dict[str, Any]:
    """The message with its content in a form that the template reads."""
    content = message["content"]
    role = message["role"] if message["role"] in ROLES else "user"
    if content is None:  # only beside calls
        return {**message, "content": None if READS_NONE.search(source) else ""}
    reads_text, reads_parts = _forms(source, special_tokens, role)
    if isinstance(content, str):
        content = content if reads_text else _parts(content)
    elif not reads_parts:
        content = "\n".join(part["text"] for part in content)  # as vLLM does
    return {**message, "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _has_text(content: Content) -> bool:
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return any(not text.isspace() and text for text in texts)


@lru_cache(maxsize=64)
def _forms(
    source: str, special_tokens: tuple[tuple[str, str], ...], role: str
) -> tuple[bool, bool]:
    """(reads strings, reads parts): the forms of content that the template reads for this role."""

    def shows(content: Content) -> bool:
        message = {"role": role, "content": content}
        other = {"role": "user", "content": "x"}
        if role != "user":
            other = _converted(source, special_tokens, other)
        for messages in ([message], [message, other], [other, message], [other, message, other]):
            try:
                prompt = _prompt(source, messages, special_tokens)
            except Exception:  # Catch all: a template may reject this order of roles
                continue
            if PROBE.lower() in prompt.lower():
                return isinstance(content, str) or not PRINTED_PARTS.search(prompt)
        return False

    found = shows(PROBE), shows(_parts(PROBE))
    if any(found):
        return found
    has_loop = _loops_over_content(source)
    return not has_loop, has_loop


def _loops_over_content(source: str) -> bool:
    """Whether the template loops over `message.content`, or over a name assigned from it."""
    tree = _compiled(source).environment.parse(source)
    names: set[str] = set()
    for _ in tree.find_all(nodes.Assign):  # each pass may find one more of chained assignments
        names |= {
            each.target.name
            for each in tree.find_all(nodes.Assign)
            if isinstance(each.target, nodes.Name) and _is_content(each.node, names)
        }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: Collection[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getitem):
        is_slice = isinstance(node.arg, nodes.Slice)
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return is_key or (is_slice and _is_content(node.node, names))
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda written: datetime.now().strftime(written)
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
