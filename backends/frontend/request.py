"""A parsed request: checked and complete, with every default filled in.

`parse` either returns a ClientRequest or raises InvalidRequest with *all* problems, each with the
limit or the remedy. The defaults are in model_repository/README.md (Tensors, Request parameters).

Triton's /generate turns JSON fields that are not tensors into parameters. A misspelt tensor
therefore arrives as a parameter. Unknown parameters are rejected, with the most similar known name.

Not here: reading single tensors (inputs.py), limits of sampling (engine/sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends import tensors
from backends.engine.sampling_params import SamplingLimits, SamplingParams
from backends.errors import InvalidRequest
from backends.frontend import sampling as client_sampling
from backends.frontend.inputs import (
    DTYPES,
    NAMES,
    InputReader,
    as_text,
    did_you_mean,
    from_json,
    shown,
)
from backends.text.chat_template import OWN_VARIABLES
from backends.text.text_stream import new_text
from backends.text.tokenizer import Tokenizer
from backends.text.tool_calls.requests import read_calls, read_functions
from mooncake_store.block_keys import SALT_SEPARATOR

PARAMETER_CHARACTERS_MAX = 256
PRIORITY_MAX = 2**31 - 1
TIMEOUT_MS_MAX = 24 * 3600 * 1000
STREAM_INTERVAL_MAX = 2**20
PROMPTS = ("text_input", "input_ids", "messages")
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
OF_A_CHAT = ("tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on a request; limits on sampling are in engine/sampling_params.py."""

    context_tokens_max: int  # limit of prompt and output tokens together
    vocabulary_tokens: int  # valid token ids are 0 <= id < vocabulary_tokens
    output_tokens_default: int = 256  # default of max_tokens


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A valid request with every default filled in."""

    prompt_ids: np.ndarray  # token ids of the prompt, int32
    prompt_text: str  # text of prompt_ids; "" unless includes_prompt
    sampling: SamplingParams
    is_stream: bool
    stream_interval: int  # tokens per response; 0: one response at the end
    is_paced: bool  # True: stream_interval was not given, so a response may have more tokens
    wants_decision: bool  # True: the answer has the `decision` output
    includes_prompt: bool  # True: the answer begins with the prompt
    # Parameters `tenant` and `cache_salt`. With API keys, LiveRequest replaces the tenant.
    cache_salt: str
    priority: int  # parameter `request_priority`, from -PRIORITY_MAX to PRIORITY_MAX
    prefill_worker: str  # name of the pinned worker; "": any worker
    decode_worker: str  # name of the pinned worker; "": any worker
    describe: bool  # True: return the service's properties, and generate no tokens
    timeout_ms: int  # the client's timeout in ms from the arrival; 0: none


def parse(
    inputs: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any],
    tokenizer: Tokenizer,
    limits: RequestLimits,
) -> ClientRequest:
    """Check and complete a request. No input causes another exception than InvalidRequest."""
    reader = InputReader(inputs)
    options = _Options(parameters, reader)
    prompt_ids = np.zeros(0, np.int32)
    if not options.describe:
        prompt_ids = read_prompt(reader, tokenizer, limits)
    # If the prompt is invalid, the limits of sampling are checked as for a prompt of one token.
    sampling_limits = SamplingLimits(
        max(len(prompt_ids), 1), limits.context_tokens_max, limits.vocabulary_tokens
    )
    sampling = client_sampling.read(
        reader, tokenizer, sampling_limits, limits.output_tokens_default
    )
    is_stream, stream_interval, is_paced = _streaming(reader)
    excludes_prompt = not reader.has("exclude_input_in_output") or reader.flag(
        "exclude_input_in_output"
    )
    includes_prompt = not excludes_prompt and not is_stream
    request = ClientRequest(
        prompt_ids=prompt_ids,
        prompt_text=new_text(tokenizer, [], prompt_ids.tolist(), False) if includes_prompt else "",
        sampling=sampling,
        is_stream=is_stream,
        stream_interval=stream_interval,
        is_paced=is_paced,
        wants_decision=reader.flag("return_decision"),
        includes_prompt=includes_prompt,
        cache_salt=options.cache_salt,
        priority=options.priority,
        prefill_worker=options.prefill_worker,
        decode_worker=options.decode_worker,
        describe=options.describe,
        timeout_ms=options.timeout_ms,
    )
    _answers(reader)
    for name in ("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"):
        reader.flag(name)  # only the type is checked, because these inputs have no effect
    if reader.problems:
        raise InvalidRequest(reader.problems)
    return request


def answers_wanted(inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> int:
    """Number of answers to the prompt. 1 for an invalid number, which `parse` reports."""
    wants_facts = "describe" in parameters or "num_return_sequences" not in inputs
    return 1 if wants_facts else _answers(InputReader(inputs))


def _answers(reader: InputReader) -> int:
    answers = reader.integer("num_return_sequences")
    if answers is None:
        return 1
    if not 1 <= answers <= tensors.ANSWERS_MAX:
        reader.note(f"num_return_sequences is {answers}; use 1 to {tensors.ANSWERS_MAX}")
        return 1
    return answers


def parse_prompt(
    inputs: Mapping[str, np.ndarray], tokenizer: Tokenizer, limits: RequestLimits
) -> np.ndarray:
    """The prompt's token ids, for the preprocessing model; raises InvalidRequest."""
    reader = InputReader(inputs)
    found = read_prompt(reader, tokenizer, limits)
    if reader.problems:
        raise InvalidRequest(reader.problems)
    return found


def read_prompt(reader: InputReader, tokenizer: Tokenizer, limits: RequestLimits) -> np.ndarray:
    """The prompt's token ids as int32. If the prompt is invalid, `reader` notes the problem.

    `messages` is a JSON list of {"role", "content"}. Content is a string or a list of text parts,
    as in OpenAI's interface. A message may have `tool_calls`, or answer one with `tool_call_id`.
    `tools` is a JSON list of functions. `chat_template_kwargs` is a JSON object with variables of
    the chat template.
    """
    given = [name for name in PROMPTS if reader.has(name)]
    problems_before = len(reader.problems)
    if len(given) != 1:
        what = f"the prompt is given {len(given)} times" if given else "there is no prompt"
        reader.note(f"{what}; send exactly one of {', '.join(PROMPTS)}")
        return np.zeros(0, np.int32)
    try:
        token_ids = _token_ids(reader, given[0], tokenizer)
    except InvalidRequest as error:
        reader.note(f"{given[0]}: {error}")
        token_ids = np.zeros(0, np.int64)
    if token_ids.size == 0 and len(reader.problems) == problems_before:
        reader.note(f"the prompt is empty; put at least one token into {given[0]}")
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= limits.vocabulary_tokens))
    if outside.size:
        first = int(outside[0])
        reader.note(
            f"{given[0]} has {outside.size} token id(s) outside the vocabulary, the first is "
            f"{token_ids[first]} at index {first}; use 0 to {limits.vocabulary_tokens - 1}"
        )
        return np.zeros(0, np.int32)
    return token_ids.astype(np.int32)


def _token_ids(reader: InputReader, source: str, tokenizer: Tokenizer) -> np.ndarray:
    is_chat = source == "messages"
    for name in OF_A_CHAT:
        if reader.has(name) and not is_chat:
            reader.note(f"{name} needs messages; the prompt is {source}")
    adds_special = reader.flag("add_special_tokens") if reader.has("add_special_tokens") else None
    if source == "input_ids":
        values = reader.values(source)
        return np.zeros(0, np.int64) if values is None else values
    text = reader.text(source, tensors.TEXT_BYTES_MAX)
    if text and is_chat:
        messages = _messages(reader, text)
        tools, options = _tools(reader), _template_options(reader)
        text = tokenizer.apply_chat(messages, tools, options) if messages else ""
    # Some tokenizers add a BOS token even to an empty text, which would hide the empty prompt.
    adds_special = not is_chat if adds_special is None else adds_special
    token_ids = tokenizer.encode(text, add_special=adds_special) if text else []
    return np.array(token_ids, np.int64)


def _messages(reader: InputReader, text: str) -> list[dict[str, Any]]:
    """The messages; [] if there is a problem, which is noted in `reader`."""
    content, problem = from_json("messages", text)
    if not problem and (not isinstance(content, list) or not content):
        problem = f"messages is {shown(content)}; send a JSON list with at least one message"
    if problem:
        reader.note(problem)
        return []
    read = [_message(f"messages[{index}]", message) for index, message in enumerate(content)]
    problems = [problem for _, problem in read if problem]
    reader.note_some(problems)
    return [] if problems else [message for message, _ in read]


def _tools(reader: InputReader) -> list[dict[str, Any]]:
    """The functions of the request; [] if there are none or a problem, which is noted."""
    text = reader.text("tools", tensors.TEXT_BYTES_MAX)
    if not text:
        return []
    content, problem = from_json("tools", text)
    found, wrong = (None, problem) if problem else read_functions("tools", content)
    if wrong:
        reader.note(wrong)
    return found or []


def _template_options(reader: InputReader) -> dict[str, Any]:
    """Variables of the chat template; {} if there are none or a problem, which is noted."""
    text = reader.text("chat_template_kwargs", tensors.TEXT_BYTES_MAX)
    if not text:
        return {}
    content, problem = from_json("chat_template_kwargs", text)
    if not problem and not isinstance(content, dict):
        problem = f"chat_template_kwargs is {shown(content)}; send a JSON object"
    own = [] if problem else [name for name in OWN_VARIABLES if name in content]
    if own:
        problem = f"chat_template_kwargs has {own[0]}, which the request itself has"
    if problem:
        reader.note(problem)
        return {}
    return dict(content)


def _message(name: str, message: Any) -> tuple[dict[str, Any], str]:
    """(message, "") or ({}, problem)."""
    if not isinstance(message, dict):
        return {}, f"{name} is {shown(message)}; send an object with role and content"
    unknown = sorted(message.keys() - set(MESSAGE_KEYS))
    if unknown:
        return {}, f"{name} has {shown(unknown[0])}, which is not supported; send role and content"
    if message.get("role") is None:
        return {}, f"{name} has no role; send for example user"
    role, problem = as_text(f"{name}.role", message["role"])
    if problem or not role:
        return {}, problem or f"{name}.role is empty; send for example user"
    found: dict[str, Any] = {"role": role, "content": None}
    if message.get("tool_calls") is not None:
        found["tool_calls"], problem = read_calls(f"{name}.tool_calls", message["tool_calls"])
    elif message.get("content") is None:
        problem = f"{name} has no content"
    for key in ("tool_call_id", "name", "reasoning_content"):
        if message.get(key) is not None and not problem:
            found[key], problem = as_text(f"{name}.{key}", message[key])
    if message.get("content") is not None and not problem:
        found["content"], problem = _content(f"{name}.content", message["content"])
    return ({}, problem) if problem else (found, "")


def _content(name: str, content: Any) -> tuple[str | list[dict[str, str]], str]:
    """(text or text parts, "") or ("", problem)."""
    if not isinstance(content, list):
        text, problem = as_text(name, content)
        return text or "", problem
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            return "", f"{name}[{index}] is {shown(part)}; only parts of type text are supported"
        text, problem = as_text(f"{name}[{index}].text", part.get("text"))
        if problem:
            return "", problem
        parts.append({"type": "text", "text": text or ""})
    return parts, ""


def _streaming(reader: InputReader) -> tuple[bool, int, bool]:
    is_stream = reader.flag("stream")
    interval = reader.integer("stream_interval")
    if interval is not None and not 1 <= interval <= STREAM_INTERVAL_MAX:
        reader.note(f"stream_interval is {interval}; use 1 to {STREAM_INTERVAL_MAX} tokens")
    return is_stream, (interval or 1) if is_stream else 0, interval is None


class _Options:
    """The KServe parameters of the request."""

    def __init__(self, parameters: Mapping[str, Any], reader: InputReader) -> None:
        self._parameters = parameters
        self._reader = reader
        reader.note_some([_unknown(name) for name in parameters if not _is_known(name)])
        self.priority = self._integer("request_priority", PRIORITY_MAX)
        self._text("id")  # only the type is checked, because the frontend makes its own ids
        tenant, salt = self._text("tenant"), self._text("cache_salt")
        self.cache_salt = f"{tenant}{SALT_SEPARATOR}{salt}" if salt else tenant
        if SALT_SEPARATOR in tenant:
            reader.note(f"parameter tenant has {SALT_SEPARATOR!r}; leave it out")
        self._text("tenant_proof")  # only the type is checked: Frontend.submit verified the proof
        self.timeout_ms = self._integer("timeout_ms", TIMEOUT_MS_MAX)
        if self.timeout_ms < 0:
            reader.note(
                f"parameter timeout_ms is {self.timeout_ms}; send 1 or more, or leave it out"
            )
        self.prefill_worker = self._text("prefill_worker")
        self.decode_worker = self._text("decode_worker")
        self.describe = self._flag("describe")  # Frontend.submit answers the values in `_verbs`

    def _integer(self, name: str, absolute_max: int) -> int:
        value = self._parameters.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > absolute_max:
            self._reader.note(
                f"parameter {name} is {shown(value)}; send an integer, at most +-{absolute_max}"
            )
            return 0
        return value

    def _text(self, name: str) -> str:
        value = self._parameters.get(name, "")
        text, problem = as_text(f"parameter {name}", value)
        if not problem and len(value) > PARAMETER_CHARACTERS_MAX:
            problem = f"parameter {name} is longer than {PARAMETER_CHARACTERS_MAX} characters"
        self._reader.problems += [problem] if problem else []
        return text or ""

    def _flag(self, name: str) -> bool:
        value = self._parameters.get(name, False)
        if not isinstance(value, bool):
            self._reader.note(f"parameter {name} is {shown(value)}; send true or false")
        return value is True


def _is_known(name: str) -> bool:
    return name in tensors.PARAMETERS or name in tensors.TRITON_PARAMETERS


def _unknown(name: str) -> str:
    if name in NAMES:
        dtype = DTYPES.get(name, "")
        return f"{name} is an input, not a parameter; send it as a tensor {dtype}".rstrip()
    hint = did_you_mean(name, (*tensors.PARAMETERS, *NAMES))
    return f"unknown parameter {shown(name)}{hint or '; known: ' + ', '.join(tensors.PARAMETERS)}"
