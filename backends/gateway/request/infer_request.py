"""Converts a request of OpenAI's interface into the conductor's message. Pure.

For missing fields this module sets OpenAI's defaults: temperature 1 and a random seed. If
`max_tokens` is missing, the conductor's parameter `output_tokens_default` limits the answer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2

from backends.gateway.request import prompts, structured_outputs
from backends.gateway.request.fields import CHAT, COMPLETION, FIELDS, Reader, bad_field, read
from backends.gateway.request.structured_outputs import AnswerForm, only_form
from backends.gateway.request.tool_use import NONE, ToolUse, read_choice, tool_use
from backends.statuses import HttpRefusal
from backends.tensors import JSON_SCHEMA, PROMPT_OUTPUTS

MODEL = "conductor"
TEMPERATURE = 1.0  # OpenAI's default
OF_TOOLS = "tools"  # field of the form of forced calls
NEVER_ENDS = -1  # value of `end_id` that no token has, so that no token ends the answer
NAME_OF_TENSOR = {each.tensor: each.name for each in FIELDS if each.tensor} | {
    "text_input": "prompt",
    "input_ids": "prompt",
    "messages": "messages",
    "seed": "seed",
    "end_id": "ignore_eos",
    "tenant": "tenant",
    "timeout_ms": "timeout",
    "request_priority": "priority",
    "return_log_probs": "logprobs",
    "top_logprobs": "top_logprobs",
    "num_return_sequences": "n",
    "sampling_parameters": "logit_bias",
    "logit_bias": "logit_bias",
    "cache_salt": "cache_salt",
    "tools": "tools",
    "chat_template_kwargs": "chat_template_kwargs",
}
READERS: Mapping[str, Reader] = {  # kind of a field -> its reader
    "messages": prompts.read_messages,
    "prompt": prompts.read_prompts,
    "tools": prompts.read_tools,
    "tool_choice": read_choice,
    **structured_outputs.READERS,
}
FORMATS = {"INT32": "<i", "FP32": "<f", "UINT64": "<Q", "BOOL": "<?"}
TYPE_OF_KIND = {"integer": "INT32", "number": "FP32", "temperature": "FP32"}
# A request names only the outputs that it needs, because each output costs time.
OUTPUTS = ("text_output", "finish_reason")
LOGPROBS = ("output_ids", "output_log_probs", "top_token_ids", "top_log_probs")
ANSWER = "sequence_index"  # which of several answers a response belongs to
TOKEN_IDS = ("output_ids", "prompt_ids")
COUNTS = ("num_output_tokens", "num_input_tokens", "cached_tokens")


class PromptUse(NamedTuple):
    """How an answer uses its prompt."""

    is_echoed: bool  # True: the text begins with the prompt
    is_alone: bool  # True: the answer has no generated token, because max_tokens is 0
    top: int | None  # likeliest tokens of each position in `prompt_logprobs`; None: no such list
    echoed_top: int  # likeliest tokens of each position of an echoed prompt, if it has logprobs


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """A client's request after the gateway's checks."""

    route: str
    model: str  # "": any model
    is_stream: bool
    includes_usage: bool  # True: a stream has token counts; a whole answer always has them
    counts_each_event: bool  # True: each event of a stream has token counts, not only the last
    timeout_s: float  # deadline in seconds after the arrival; 0: none
    inputs: Mapping[str, Any]  # tensor -> value, for the conductor; the same for each prompt
    prompts: Sequence[Mapping[str, Any]]  # tensor -> value of each prompt
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)
    # Tensor -> name of the client's field, where it differs from NAME_OF_TENSOR; for errors.
    names: Mapping[str, str] = field(default_factory=dict)
    tools: ToolUse | None = None  # None: the answer has no calls
    kept: int = 1  # answers to each prompt that the client gets
    shows_logprobs: bool = False  # False: logprobs, if any, only compare answers
    prompt: PromptUse | None = None  # None: the answer has only generated tokens
    returns_token_ids: bool = False
    form: AnswerForm | None = None  # that `inputs` asks for; None: the answer is free text

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may have tool calls."""
        return self.tools is not None and self.tools.choice != NONE

    def with_inputs(self, **inputs: Any) -> GatewayRequest:
        return replace(self, inputs={**self.inputs, **inputs})

    @property
    def answers(self) -> int:
        """Answers to each prompt; those above `kept` are only compared (field best_of)."""
        return int(self.inputs.get("num_return_sequences", 1))

    @property
    def choices(self) -> int:
        """Answers of the request, to all of its prompts."""
        return len(self.prompts) * self.answers

    @property
    def outputs(self) -> tuple[str, ...]:
        wants_counts = self.includes_usage or not self.is_stream
        found = OUTPUTS + COUNTS if wants_counts else OUTPUTS
        if self.inputs.get("return_decision"):
            found += ("decision",)
        if self.answers > 1:
            found += (ANSWER,)
        if "prompt_logprobs" in self.inputs:
            found += PROMPT_OUTPUTS
        if self.returns_token_ids:
            found += TOKEN_IDS
        if self.wants_logprobs:
            found += LOGPROBS
        return tuple(dict.fromkeys(found))

    def of_form(self, form: AnswerForm | None) -> GatewayRequest:
        """The request for an answer of this form, in place of another one."""
        if form is None:
            return self
        before = self.form.inputs if self.form is not None else {}
        kept = {name: each for name, each in self.inputs.items() if name not in before}
        names = {**self.names, **dict.fromkeys(form.inputs, form.field)}
        return replace(self, inputs={**kept, **form.inputs}, names=names, form=form)

    @property
    def wants_logprobs(self) -> bool:
        return "return_log_probs" in self.inputs


def read_request(route: str, content: object, default_seed: int) -> GatewayRequest:
    """Read a request. Raises HttpRefusal."""
    given = read(route, content, READERS)
    tools = tool_use(given) if route == CHAT else None
    inputs = {
        each.tensor: given[each.name] for each in FIELDS if each.tensor and each.name in given
    }
    # For errors: a completion sets the tensor top_logprobs by its field `logprobs`, and the prompt
    # of a chat is its field `messages`.
    names = {"top_logprobs": "logprobs"} if route == COMPLETION else {"prompt": "messages"}
    _set_max_tokens(given, inputs, names)
    if inputs.get("top_k") == -1:  # vLLM's value for all tokens
        inputs["top_k"] = 0
    for name in ("stop_words", "stop_token_ids"):
        if not inputs.get(name, True):
            del inputs[name]
    inputs.setdefault("temperature", TEMPERATURE)
    asked = _prompts(route, given)
    kept = given.get("n", 1)
    answers = _answers(given, kept, len(asked))
    if "seed" in given:
        inputs["seed"] = given["seed"]
    else:  # equal prompts get different answers
        for index, prompt in enumerate(asked):
            prompt["seed"] = (default_seed + index * answers) % 2**64
    if given.get("ignore_eos"):
        inputs["end_id"] = NEVER_ENDS
    inputs |= (logprobs := _logprobs(route, given))
    of_prompt = _prompt_use(route, given, inputs, names)
    if answers > 1:
        inputs["num_return_sequences"] = answers
    if answers > 1 and "prompt_logprobs" in inputs:
        what = "logprobs of the prompt are available for one answer only; send n 1"
        raise bad_field(names.get("prompt_logprobs", "prompt_logprobs"), what)
    if answers > kept:
        inputs.setdefault("return_log_probs", True)
        inputs.setdefault("top_logprobs", 0)
    if biases := given.get("logit_bias"):
        inputs["sampling_parameters"] = msgspec.json.encode({"logit_bias": biases})
    form = _form(given, tools)
    if form is not None and form.field != OF_TOOLS:
        tools = None  # an answer of another form has no calls
    inputs["stream"] = is_stream = given.get("stream", False)
    options = given.get("stream_options", {})
    if options and not is_stream:
        raise bad_field("stream_options", "stream_options requires a stream; send stream: true too")
    includes_usage = options.get("include_usage", False)
    return GatewayRequest(
        route=route,
        model=given.get("model", ""),
        is_stream=is_stream,
        includes_usage=includes_usage,
        timeout_s=given.get("timeout", 0.0),
        counts_each_event=includes_usage and options.get("continuous_usage_stats", False),
        inputs=inputs,
        prompts=asked,
        parameters=_parameters(given),
        names=names,
        tools=tools,
        kept=kept,
        shows_logprobs=bool(logprobs),
        prompt=of_prompt,
        returns_token_ids=given.get("return_token_ids", False),
    ).of_form(form)


def read_as_chat(
    body: Mapping[str, Any], default_seed: int, rename: Callable[[str], str]
) -> GatewayRequest:
    """Read the chat that a request of another route is. `rename`: name of a chat's field -> name of
    the route's field, for errors. A stream has token counts. Raises HttpRefusal."""
    more = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    try:
        chat = read_request(CHAT, {**body, **more}, default_seed)
    except HttpRefusal as refusal:
        raise refusal.renamed(rename) from None
    names = {tensor: rename(name) for tensor, name in chat.names.items()}
    form = chat.form and chat.form._replace(field=rename(chat.form.field))
    return replace(chat, names=names, form=form)


def _set_max_tokens(
    given: Mapping[str, Any], inputs: dict[str, Any], names: dict[str, str]
) -> None:
    """Set `max_tokens` of `inputs` by its newer name. Raises HttpRefusal if both names differ."""
    newer = given.get("max_completion_tokens")
    if newer is None:
        return
    if inputs.get("max_tokens", newer) != newer:
        what = f"max_tokens is {inputs['max_tokens']} and max_completion_tokens is {newer}"
        raise bad_field("max_completion_tokens", f"{what}; they mean the same, send one")
    inputs["max_tokens"] = newer
    if "max_tokens" not in given:
        names["max_tokens"] = "max_completion_tokens"


def _parameters(given: Mapping[str, Any]) -> dict[str, str | int | bool]:
    """The request parameters of the conductor."""
    found: dict[str, str | int | bool] = {}
    if (timeout_s := given.get("timeout", 0.0)) > 0:
        found["timeout_ms"] = max(1, round(timeout_s * 1000))
    found |= {name: given[name] for name in ("tenant", "cache_salt") if given.get(name)}
    if (priority := given.get("priority", 0)) != 0:
        found["request_priority"] = priority
    return found


def _form(given: Mapping[str, Any], tools: ToolUse | None) -> AnswerForm | None:
    """The form that the answer must have. Raises HttpRefusal if the request asks for several."""
    form = only_form(each for each in given.values() if isinstance(each, AnswerForm))
    schema = tools.schema() if tools is not None else ""
    if schema and form is not None:
        what = f"{form.field} and a forced call exclude each other; send one of them"
        raise bad_field(form.field, what)
    return AnswerForm(OF_TOOLS, JSON_SCHEMA, schema) if schema else form


def _answers(given: Mapping[str, Any], kept: int, prompts_asked: int) -> int:
    """Answers to each prompt. Raises HttpRefusal."""
    answers = int(given.get("best_of", kept))
    if answers < kept:
        raise bad_field("best_of", f"best_of is {answers}, less than n, which is {kept}")
    if answers > kept and given.get("stream"):
        raise bad_field("best_of", "best_of above n compares whole answers; send no stream: true")
    if answers * prompts_asked > prompts.CHOICES_MAX:
        what = (
            f"{prompts_asked} prompts with {answers} answers each are more than "
            f"{prompts.CHOICES_MAX} answers; send fewer"
        )
        raise bad_field("prompt", what)
    return answers


def _prompts(route: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs that make each prompt."""
    name = "messages" if route == CHAT else "prompt"
    if name not in given:
        raise bad_field(name, f"{name} is missing; send at least one message or token")
    value = given[name]
    if route == COMPLETION:
        return [{"text_input" if isinstance(each, str) else "input_ids": each} for each in value]
    found = {"messages": msgspec.json.encode(value)}
    if given.get("tools"):
        found["tools"] = msgspec.json.encode(given["tools"])
    if options := prompts.read_template_options(given):
        found["chat_template_kwargs"] = msgspec.json.encode(options)
    return [found]


def _logprobs(route: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs for logprobs. A chat has two fields for them, a completion has one."""
    if route == CHAT:
        if not given.get("logprobs", False):
            if given.get("top_logprobs", 0):
                raise bad_field("top_logprobs", "top_logprobs requires logprobs: true; send both")
            return {}
        count = given.get("top_logprobs", 0)
    elif (count := given.get("logprobs")) is None:
        return {}
    return {"return_log_probs": True, "top_logprobs": count}


def _prompt_use(
    route: str, given: Mapping[str, Any], inputs: dict[str, Any], names: dict[str, str]
) -> PromptUse | None:
    """How the answer uses its prompt. Changes `inputs` and `names` accordingly."""
    top, is_echoed = given.get("prompt_logprobs"), given.get("echo", False)
    if top is not None and given.get("stream", False):
        what = "prompt_logprobs is not available in a stream; leave out stream, or use echo"
        raise bad_field("prompt_logprobs", what)
    if is_echoed and "top_logprobs" in inputs and (top is None or top >= 0):
        inputs["prompt_logprobs"] = max(inputs["top_logprobs"], top or 0)
        names["prompt_logprobs"] = "echo" if top is None else "prompt_logprobs"
    is_alone = route == COMPLETION and inputs.get("max_tokens") == 0
    if is_alone:
        inputs["max_tokens"] = 1  # the least that a worker generates
    if is_echoed or is_alone or top is not None:
        return PromptUse(is_echoed, is_alone, top, inputs.get("top_logprobs", 0))
    return None


TYPES = {each.tensor: TYPE_OF_KIND[each.kind] for each in FIELDS if each.kind in TYPE_OF_KIND} | {
    "text_input": "BYTES",
    "messages": "BYTES",
    "stop_words": "BYTES",
    "guided_json": "BYTES",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
    "sampling_parameters": "BYTES",
    "tools": "BYTES",
    "chat_template_kwargs": "BYTES",
    "skip_special_tokens": "BOOL",
    "add_special_tokens": "BOOL",
    "stop_token_ids": "INT32",
    "input_ids": "INT32",
    "seed": "UINT64",
    "end_id": "INT32",
    "stream": "BOOL",
    "return_log_probs": "BOOL",
    "top_logprobs": "INT32",
    "num_return_sequences": "INT32",
    "return_decision": "BOOL",
}


def infer_request(
    request: GatewayRequest, request_id: str, prompt: int = 0
) -> service_pb2.ModelInferRequest:
    """The message for prompt `prompt` of the request."""
    message = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, value in {**request.prompts[prompt], **request.inputs}.items():
        datatype, count, raw = TYPES[name], 1, b""
        if datatype == "BYTES":
            texts = value if isinstance(value, list) else [value]
            count, raw = len(texts), b"".join(_string(text) for text in texts)
        elif isinstance(value, list):
            count, raw = len(value), np.array(value, np.int32).tobytes()
        else:
            raw = struct.pack(FORMATS[datatype], value)
        message.inputs.add(name=name, datatype=datatype, shape=(1, count))
        message.raw_input_contents.append(raw)
    for name in request.outputs:
        message.outputs.add(name=name)
    _set_parameters(message, request.parameters)
    return message


def describe_request(parameters: Mapping[str, str | bool]) -> service_pb2.ModelInferRequest:
    """A message with the parameter `describe`. It has an input, because Triton requires one."""
    message = service_pb2.ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="stream", datatype="BOOL", shape=(1, 1))
    message.raw_input_contents.append(struct.pack(FORMATS["BOOL"], False))
    for name in OUTPUTS:
        message.outputs.add(name=name)
    _set_parameters(message, parameters)
    return message


def _set_parameters(
    message: service_pb2.ModelInferRequest, parameters: Mapping[str, str | int | bool]
) -> None:
    for name, value in parameters.items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return len(raw).to_bytes(4, "little") + raw
