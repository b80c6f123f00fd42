"""The fields of a request in OpenAI's interface: one table for parsing and for the OpenAPI schema.

This module rejects wrong types, numbers that do not fit the data type of the conductor's tensor,
and unsupported fields. An unsupported field is accepted if its value changes nothing. The conductor
checks the range of values (frontend/sampling.py). The gateway returns the conductor's errors under
the field's name in OpenAI's interface. Pure.
"""

from __future__ import annotations

import difflib
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.gateway.request.schemas import (
    EFFORTS,
    GUIDES,
    INT32,
    SCHEMAS,
    SECONDS_MAX,
    SECONDS_MIN,
    TEMPERATURE_MAX,
)
from backends.statuses import HttpRefusal
from backends.tensors import ANSWERS_MAX

REFUSALS_MAX = 8  # bad fields that the refusal of one request lists
SHOWN_CHARACTERS_MAX = 40  # an error message shows at most this part of a value
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 4
# reprlib cuts out the middle of longer strings and integers.
_BRIEF.maxstring = _BRIEF.maxlong = 4 * SHOWN_CHARACTERS_MAX
_BRIEF.maxlist = _BRIEF.maxdict = SHOWN_CHARACTERS_MAX
CHAT, COMPLETION, RESPONSES, MESSAGES = "chat", "completion", "responses", "messages"
ALL = (CHAT, COMPLETION, RESPONSES, MESSAGES)
REQUIRED = {
    CHAT: ["messages"],
    COMPLETION: ["prompt"],
    RESPONSES: ["input"],
    MESSAGES: ["messages", "max_tokens"],
}
BOTH = (CHAT, COMPLETION)


@dataclass(frozen=True, slots=True)
class Field:
    """A field that the gateway reads."""

    name: str
    kind: str  # key of SCHEMAS
    meaning: str  # description in the OpenAPI schema
    tensor: str = ""  # input of the conductor; "": infer_request.py converts or ignores the field
    routes: tuple[str, ...] = BOTH


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that is rejected unless its value is one of `neutral`."""

    name: str
    neutral: tuple[object, ...] = ()  # values that change nothing
    routes: tuple[str, ...] = BOTH


# Fields that change no answer -> their kinds. Only their types are checked.
IGNORED = {
    "user": "text",
    "metadata": "object",
    "safety_identifier": "text",
    "prompt_cache_key": "text",  # cached blocks are found by content
    "prompt_cache_retention": "text",
    "prompt_cache_options": "object",
    "service_tier": "text",
    "store": "flag",  # answers are not stored
    "request_id": "text",  # the header X-Request-Id names a request
    "session_id": "text",
}
# Responses keeps these two.
OF_IGNORED = {"store": BOTH, "metadata": (*BOTH, MESSAGES)}
RESPONSES_FIELDS = tuple(
    Field(name, kind, meaning, routes=(RESPONSES,))
    for name, kind, meaning in (
        ("input", "input", "a text, or a list of items: messages, calls and their outputs"),
        ("instructions", "text", "a system message before the input"),
        ("max_output_tokens", "integer", "largest number of tokens of the answer"),
        ("tools", "response_tools", "functions that the model may call"),
        ("tool_choice", "response_choice", "none, auto (default), required, or a function"),
        ("text", "response_text", "format of the answer: text, json_object or json_schema"),
        ("reasoning", "reasoning", "effort: variable reasoning_effort of the chat template"),
        ("include", "include", "message.output_text.logprobs: log probabilities of the tokens"),
        ("previous_response_id", "text", "a stored response, which the input continues"),
        ("store", "flag", "keep the response for later requests; default false"),
        ("metadata", "metadata", "returned with the response"),
        ("stream_options", "stream_options", "include_obfuscation is ignored"),
        ("max_tool_calls", "integer", "ignored: limits tools of the server, which has none"),
    )
)
OF_ANTHROPIC = ("inference_geo", "speed", "user_profile_id", "workspace_id")
MESSAGES_FIELDS = tuple(
    Field(name, kind, meaning, routes=(MESSAGES,))
    for name, kind, meaning in (
        ("messages", "turns", "the conversation so far: messages of user and assistant"),
        ("system", "system", "a text, or blocks of text"),
        ("max_tokens", "integer", "largest number of tokens of the answer"),
        ("stop_sequences", "stop", "words that end the answer"),
        ("tools", "anthropic_tools", "functions that the model may call"),
        ("tool_choice", "anthropic_choice", "auto (default), any, none or tool"),
        ("thinking", "thinking", "variable enable_thinking of the chat template"),
        ("output_config", "output_config", "effort, and format: JSON of a schema"),
        ("context_management", "object", "ignored"),
        ("cache_control", "object", "ignored: cached blocks are found by their content"),
        ("diagnostics", "object", "ignored"),
        *((name, "text", "ignored") for name in OF_ANTHROPIC),
    )
)
FIELDS = (
    Field("model", "text", "name of the model, as in /v1/models", routes=ALL),
    Field("messages", "messages", "the conversation so far", routes=(CHAT,)),
    Field(
        "prompt",
        "prompt",
        "a text, the ids of its tokens, or a list of several such prompts",
        routes=(COMPLETION,),
    ),
    Field("max_tokens", "integer", "largest number of tokens of the answer", "max_tokens"),
    Field("max_completion_tokens", "integer", "the newer name of max_tokens", routes=(CHAT,)),
    Field(
        "min_tokens", "integer", "smallest number of tokens of the answer", "min_tokens", routes=ALL
    ),
    Field("ignore_eos", "flag", "do not end the answer at an end-of-sequence token", routes=ALL),
    Field("temperature", "temperature", "0: greedy; default 1", "temperature", routes=ALL),
    Field(
        "top_p",
        "number",
        "smallest set of top tokens with this total probability",
        "top_p",
        routes=ALL,
    ),
    Field(
        "top_k", "integer", "sample from the k likeliest tokens; 0 or -1: all", "top_k", routes=ALL
    ),
    Field(
        "min_p",
        "number",
        "smallest probability, relative to the likeliest token's",
        "min_p",
        routes=ALL,
    ),
    Field(
        "presence_penalty",
        "number",
        "subtracted from the logit of each token that the answer contains",
        "presence_penalty",
        routes=ALL,
    ),
    Field(
        "frequency_penalty",
        "number",
        "subtracted from the logit of a token for each of its occurrences in the answer",
        "frequency_penalty",
        routes=ALL,
    ),
    Field(
        "repetition_penalty",
        "number",
        "divides positive logits of prompt and answer tokens, multiplies negative ones; 1: off",
        "repetition_penalty",
        routes=ALL,
    ),
    Field("seed", "seed", "equal seeds give equal answers; random by default", routes=ALL),
    Field("stop", "stop", "words that end the answer", "stop_words", routes=ALL),
    Field(
        "stop_token_ids", "token_ids", "tokens that end the answer", "stop_token_ids", routes=ALL
    ),
    Field("logprobs", "flag", "return the log probability of each token", routes=(CHAT,)),
    Field(
        "top_logprobs",
        "integer",
        "number of likeliest tokens returned per position, 0 to 20",
        routes=(CHAT, RESPONSES),
    ),
    Field(
        "logprobs",
        "integer",
        "return the log probability of each token, and this number of likeliest tokens, 0 to 20",
        routes=(COMPLETION,),
    ),
    Field("echo", "flag", "begin the text, and logprobs, with the prompt", routes=(COMPLETION,)),
    Field(
        "prompt_logprobs",
        "integer",
        "as logprobs of a completion, for each token of the prompt; not in a stream",
        "prompt_logprobs",
    ),
    Field("return_token_ids", "flag", "return the ids of the prompt's and the answer's tokens"),
    Field(
        "add_special_tokens",
        "flag",
        "add the tokenizer's special tokens to the prompt; default: only to a text",
        "add_special_tokens",
    ),
    Field("tools", "tools", "functions that the model may call", routes=(CHAT,)),
    Field(
        "tool_choice",
        "tool_choice",
        "none, auto (default), required, or the function that the model must call",
        routes=(CHAT,),
    ),
    Field(
        "parallel_tool_calls",
        "flag",
        "false: at most one call in an answer",
        routes=(CHAT, RESPONSES),
    ),
    Field(
        "reasoning_effort",
        "effort",
        "variable of the chat template; none: also its variable enable_thinking is false",
        routes=(CHAT,),
    ),
    Field(
        "chat_template_kwargs",
        "object",
        "variables of the chat template",
        routes=(CHAT, RESPONSES, MESSAGES),
    ),
    Field(
        "add_generation_prompt",
        "flag",
        "false: the prompt ends with the last message",
        routes=(CHAT,),
    ),
    Field(
        "continue_final_message",
        "flag",
        "true: the answer continues the last message",
        routes=(CHAT,),
    ),
    Field(
        "skip_special_tokens",
        "flag",
        "false: the answer's text has special tokens, but not the end token",
        "skip_special_tokens",
    ),
    Field("response_format", "format", "json_schema: the answer follows the schema; json_object"),
    Field("structured_outputs", "guide", "json, regex, choice, grammar or json_object: its form"),
    *(Field(f"guided_{key}", f"guided_{key}", f"structured_outputs.{key}") for key in GUIDES),
    Field("logit_bias", "logit_bias", "token id -> number that is added to its logit", routes=ALL),
    Field("stream", "flag", "send server-sent events", routes=ALL),
    Field(
        "stream_options",
        "stream_options",
        "include_usage: a last event with token counts; continuous_usage_stats: in each event",
    ),
    Field(
        "return_decision",
        "flag",
        "return the routing decision and its outcome as `decision`",
        "return_decision",
    ),
    Field("n", "answers", "number of answers to each prompt"),
    Field(
        "best_of",
        "answers",
        "number of answers of which the `n` with the highest mean logprob are returned",
        routes=(COMPLETION,),
    ),
    Field("timeout", "seconds", "deadline in seconds after the arrival", routes=ALL),
    Field(
        "priority",
        "integer",
        "below 0: rejected earlier under load; above 0: preempts lower priorities in decode",
        routes=ALL,
    ),
    Field(
        "tenant",
        "text",
        "requests of a tenant share KV; with API keys, the key's tenant",
        routes=ALL,
    ),
    Field("cache_salt", "text", "requests share KV only if their salts are equal", routes=ALL),
    *RESPONSES_FIELDS,
    *MESSAGES_FIELDS,
    *(
        Field(name, kind, "ignored, as it changes no answer", routes=OF_IGNORED.get(name, ALL))
        for name, kind in IGNORED.items()
    ),
)
UNSUPPORTED = (
    UnsupportedField("background", (False,), (RESPONSES,)),
    UnsupportedField("conversation", (), (RESPONSES,)),
    UnsupportedField("prompt", (), (RESPONSES,)),
    UnsupportedField("truncation", ("disabled",), (RESPONSES,)),
    UnsupportedField("context_management", ([],), (RESPONSES,)),
    UnsupportedField("moderation", (), (RESPONSES,)),
    UnsupportedField("access_programs", (), (RESPONSES,)),
    UnsupportedField("background_options", (), (RESPONSES,)),
    UnsupportedField("image", (), (RESPONSES,)),
    UnsupportedField("container", (), (MESSAGES,)),
    UnsupportedField("mcp_servers", ([],), (MESSAGES,)),
    UnsupportedField("best_of", (1,), (CHAT,)),
    UnsupportedField("echo", (False,), (CHAT,)),
    UnsupportedField("suffix", ("",), (COMPLETION,)),
    UnsupportedField("functions", ([],), (CHAT,)),
    UnsupportedField("function_call", ("none", "auto"), (CHAT,)),
    UnsupportedField("modalities", (["text"],), (CHAT,)),
    UnsupportedField("audio", (), (CHAT,)),
    UnsupportedField("prediction", (), (CHAT,)),
    UnsupportedField("web_search_options", (), (CHAT,)),
    UnsupportedField("verbosity", ("medium",), (CHAT,)),
    UnsupportedField("moderation", (), (CHAT,)),
    UnsupportedField("images"),
    UnsupportedField("use_beam_search", (False,)),
    UnsupportedField("length_penalty", (1,)),
    UnsupportedField("bad_words", ([],)),
    UnsupportedField("include_stop_str_in_output", (False,)),
    UnsupportedField("spaces_between_special_tokens", (True,)),
    UnsupportedField("include_reasoning", (True,)),
    UnsupportedField("return_tokens_as_token_ids", (False,)),
)
# continuous_usage_stats is an option of vLLM, which aiperf and GuideLLM send.
STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")


# Sampling and scheduling: fields that mean the same on each route.
SHARED = tuple(each.name for each in FIELDS if each.routes == ALL and each.name not in IGNORED)
# route -> (name -> field, name -> unsupported field)
TABLES = {
    route: (
        {field.name: field for field in FIELDS if route in field.routes},
        {field.name: field for field in UNSUPPORTED if route in field.routes},
    )
    for route in ALL
}


def schema(route: str) -> dict[str, Any]:
    """The JSON schema of a request's body, for the OpenAPI document."""
    return {
        "type": "object",
        "properties": {
            name: {"description": field.meaning, **SCHEMAS[field.kind]}
            for name, field in TABLES[route][0].items()
        },
        "required": REQUIRED[route],
        "additionalProperties": False,
    }


Reader = Callable[[Any], Any]  # the checked value of a field; raises HttpRefusal


def read(route: str, content: object, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Field -> checked value, without null fields. `readers`: of fields that this module does not
    read, by kind. Raises HttpRefusal with all bad fields."""
    if not isinstance(content, dict):
        raise bad_field("body", f"the body is {shown(content)}; send a JSON object", None)
    found: dict[str, Any] = {}
    refusals: list[HttpRefusal] = []
    for name, value in content.items():
        if value is None:
            continue
        try:
            found |= _read_field(route, name, value, readers)
        except HttpRefusal as refusal:
            refusals.append(refusal)
            if len(refusals) == REFUSALS_MAX:
                break
    if refusals:
        raise all_of(refusals)
    return found


def _read_field(
    route: str, name: str, value: object, readers: Mapping[str, Reader]
) -> dict[str, Any]:
    """{name: checked value}; {} for an unsupported field with a neutral value."""
    known, unsupported = TABLES[route]
    if (field := known.get(name)) is not None:
        own = readers.get(field.kind)
        return {name: own(value) if own else _READERS[field.kind](name, value)}
    if name in unsupported:
        _refuse_unless_neutral(unsupported[name], value)
        return {}
    close = difflib.get_close_matches(name[:64], [*known, *unsupported], n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise bad_field(name[:64], f"unknown field {shown(name)}{hint}")


def all_of(refusals: Sequence[HttpRefusal]) -> HttpRefusal:
    """One refusal with the messages of all. The first one decides its code and `param`."""
    first, *further = refusals
    return HttpRefusal(first.status, first.code, first.message, first.param, further=further)


def _refuse_unless_neutral(field: UnsupportedField, value: object) -> None:
    # In Python True == 1, but in JSON true and 1 differ.
    is_flag = isinstance(value, bool)
    if any(is_flag is isinstance(each, bool) and value == each for each in field.neutral):
        return
    only = f" or send {field.neutral[0]!r}" if field.neutral else ""
    raise bad_field(
        field.name,
        f"{field.name} is not supported by this server; leave it out{only}",
        code="unsupported",
    )


def bad_field(
    name: str, message: str, param: str | None = "", code: str = "invalid_request"
) -> HttpRefusal:
    """`param`: the field in OpenAI's error object. "": `name`; None: no field."""
    return HttpRefusal(400, code, message, name if param == "" else param)


def shown(value: object) -> str:
    """The value as text, shortened for an error message."""
    text = _BRIEF.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."


def _integer(name: str, value: object, bits: int = 32, most: int = INT32 - 1) -> int:
    if isinstance(value, float) and value.is_integer():  # the JSON library Gson writes 16 as 16.0
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_field(name, f"{name} is {shown(value)}; send an integer")
    if not -(2 ** (bits - 1)) <= value <= most:
        raise bad_field(name, f"{name} is {shown(value)}; send an integer of {bits} bits")
    return value


def _seed(name: str, value: object) -> int:
    """The seed as UINT64. A negative seed maps to its two's complement of 64 bits."""
    return _integer(name, value, bits=64, most=2**64 - 1) % 2**64


def _answers(name: str, value: object) -> int:
    answers = _integer(name, value)
    if not 1 <= answers <= ANSWERS_MAX:
        raise bad_field(name, f"{name} is {answers}; send 1 to {ANSWERS_MAX}")
    return answers


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field(name, f"{name} is {shown(value)}; send a number")
    try:
        struct.pack("<f", value)
    except (OverflowError, struct.error):
        raise bad_field(name, f"{name} is {shown(value)}; send a 32-bit float") from None
    return float(value)


def _temperature(name: str, value: object) -> float:
    temperature = _number(name, value)
    if not 0 <= temperature <= TEMPERATURE_MAX:
        what = f"{name} is {shown(value)}; send 0 (greedy) to {TEMPERATURE_MAX}"
        raise bad_field(name, what)
    return temperature


def _seconds(name: str, value: object) -> float:
    seconds = _number(name, value)
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        limits = f"{SECONDS_MIN} to {SECONDS_MAX}"
        raise bad_field(name, f"{name} is {shown(value)}; send seconds, {limits}")
    return seconds


def _effort(name: str, value: object) -> str:
    if value not in EFFORTS:
        raise bad_field(name, f"{name} is {shown(value)}; send {', '.join(EFFORTS)}")
    return str(value)


def as_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise bad_field(name, f"{name} is {shown(value)}; send true or false")
    return value


def as_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise bad_field(name, f"{name} is {shown(value)}; send a string")
    return value


def as_object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(name, f"{name} is {shown(value)}; send an object")
    return value


def as_objects(name: str, value: object, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, object) of each in a list. `kind`: what the list has, for the error."""
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shown(value)}; send a list of {kind}")
    for index, each in enumerate(value):
        place = f"{name}[{index}]"
        yield place, as_object(place, each)


def _stop(name: str, value: object) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad_field(name, f"{name} is {shown(value)}; send a string or a list of strings")
    if "" in words:
        raise bad_field(name, f"{name} has an empty string, which every answer has; leave it out")
    return words


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shown(value)}; send a list of token ids")
    return [_integer(f"{name}[{index}]", each) for index, each in enumerate(value)]


def _stream_options(name: str, value: object) -> dict[str, bool]:
    options = as_object(name, value)
    for key, flag in options.items():
        if key not in STREAM_OPTIONS:
            raise bad_field(
                f"{name}.{key[:64]}", f"{name} has {shown(key)}; known: {', '.join(STREAM_OPTIONS)}"
            )
        if flag is not None:
            as_flag(f"{name}.{key}", flag)
    return {key: flag is True for key, flag in options.items()}


def _logit_bias(name: str, value: object) -> dict[str, float]:
    biases = as_object(name, value)
    for key in biases:
        if not (key.isascii() and key.isdigit()):
            raise bad_field(f"{name}.{key[:64]}", f"{name} has {shown(key)}; send token ids")
    return {key: _number(f"{name}.{key[:64]}", bias) for key, bias in biases.items()}


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "integer": _integer,
    "seed": _seed,
    "answers": _answers,
    "number": _number,
    "temperature": _temperature,
    "seconds": _seconds,
    "flag": as_flag,
    "text": as_text,
    "effort": _effort,
    "object": as_object,
    "stop": _stop,
    "token_ids": _token_ids,
    "stream_options": _stream_options,
    "logit_bias": _logit_bias,
}
