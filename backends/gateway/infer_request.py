"""A request in OpenAI's interface as the message that the conductor takes. Pure.

What OpenAI's interface says of a field that is not there is said here: temperature is 1, the seed
is any, an answer ends where the conductor's `output_tokens_default` does.

Not here: reading fields (fields.py, prompts.py), sending (frontend_calls.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2

from backends.gateway import prompts
from backends.gateway.fields import CHAT, COMPLETION, FIELDS, bad_field, read

MODEL = "conductor"
TEMPERATURE = 1.0  # OpenAI's, where a request names none
NEVER_ENDS = -1  # of `end_id`
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
    "guided_json": "response_format",
}
FORMATS = {"INT32": "<i", "FP32": "<f", "UINT64": "<Q", "BOOL": "<?"}
TYPE_OF_KIND = {"integer": "INT32", "number": "FP32"}
# A response carries what is asked for by name, and each costs in Triton.
OUTPUTS = ("text_output", "finish_reason")
LOGPROBS = ("output_ids", "output_log_probs", "top_token_ids", "top_log_probs")
COUNTS = ("num_output_tokens", "num_input_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """What a client asked for, read and checked as far as the gateway does."""

    route: str
    model: str  # "": whatever is served
    is_stream: bool
    includes_usage: bool  # in a stream; an answer that is whole always has it
    counts_each_event: bool  # and not only at the end
    timeout_s: float  # 0: none of its own
    inputs: Mapping[str, Any]  # of the conductor, by tensor
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)
    # Of the fields that this request names otherwise than NAME_OF_TENSOR does.
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        wants_counts = self.includes_usage or not self.is_stream
        found = OUTPUTS + COUNTS if wants_counts else OUTPUTS
        if self.inputs.get("return_decision"):
            found += ("decision",)
        return found + LOGPROBS if self.wants_logprobs else found

    @property
    def wants_logprobs(self) -> bool:
        return "return_log_probs" in self.inputs


def read_request(route: str, content: object, new_seed: Callable[[], int]) -> GatewayRequest:
    """HttpRefusal for the first field that is wrong."""
    said = read(route, content)
    inputs: dict[str, Any] = {}
    if route == CHAT:
        messages = prompts.read_messages(said.get("messages"))
        inputs["messages"] = msgspec.json.encode(messages)
    else:
        prompt = prompts.read_prompt(said.get("prompt"))
        inputs["text_input" if isinstance(prompt, str) else "input_ids"] = prompt
    inputs |= {each.tensor: said[each.name] for each in FIELDS if each.tensor and each.name in said}
    # A completion says in `logprobs` how many; a chat has its prompt in `messages`.
    names = {"top_logprobs": "logprobs"} if route == COMPLETION else {"prompt": "messages"}
    if (newer := said.get("max_completion_tokens")) is not None:
        if inputs.get("max_tokens", newer) != newer:
            what = f"max_tokens is {inputs['max_tokens']} and max_completion_tokens is {newer}"
            raise bad_field("max_completion_tokens", f"{what}; they mean the same, send one")
        inputs["max_tokens"] = newer
        if "max_tokens" not in said:
            names["max_tokens"] = "max_completion_tokens"
    if inputs.get("top_k") == -1:  # vLLM's word for all
        inputs["top_k"] = 0
    if not inputs.get("stop_words", True):
        del inputs["stop_words"]
    inputs.setdefault("temperature", TEMPERATURE)
    seed = said.get("seed")
    inputs["seed"] = new_seed() if seed is None else seed
    if said.get("ignore_eos"):
        inputs["end_id"] = NEVER_ENDS
    inputs |= _logprobs(route, said)
    if schema := said.get("response_format", ""):
        inputs["guided_json"] = schema
    inputs["stream"] = is_stream = said.get("stream", False)
    parameters: dict[str, str | int | bool] = {}
    if (timeout_s := said.get("timeout", 0.0)) > 0:
        parameters["timeout_ms"] = max(1, round(timeout_s * 1000))
    if tenant := said.get("tenant", ""):
        parameters["tenant"] = tenant
    if (priority := said.get("priority", 0)) != 0:
        parameters["request_priority"] = priority
    options = said.get("stream_options", {})
    if options and not is_stream:
        raise bad_field("stream_options", "stream_options is for streams; send stream: true too")
    includes_usage = options.get("include_usage", False)
    return GatewayRequest(
        route=route,
        model=said.get("model", ""),
        is_stream=is_stream,
        includes_usage=includes_usage,
        timeout_s=timeout_s,
        counts_each_event=includes_usage and options.get("continuous_usage_stats", False),
        inputs=inputs,
        parameters=parameters,
        names=names,
    )


def _logprobs(route: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """A chat says whether and how many in two fields, a completion in one."""
    if route == CHAT:
        if not said.get("logprobs", False):
            if said.get("top_logprobs", 0):
                raise bad_field("top_logprobs", "top_logprobs wants logprobs: true beside it")
            return {}
        count = said.get("top_logprobs", 0)
    elif (count := said.get("logprobs")) is None:
        return {}
    return {"return_log_probs": True, "top_logprobs": count}


TYPES = {each.tensor: TYPE_OF_KIND[each.kind] for each in FIELDS if each.kind in TYPE_OF_KIND} | {
    "text_input": "BYTES",
    "messages": "BYTES",
    "stop_words": "BYTES",
    "guided_json": "BYTES",
    "input_ids": "INT32",
    "seed": "UINT64",
    "end_id": "INT32",
    "stream": "BOOL",
    "return_log_probs": "BOOL",
    "top_logprobs": "INT32",
    "return_decision": "BOOL",
}


def infer_request(request: GatewayRequest, request_id: str) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, value in request.inputs.items():
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
    for name, value in request.parameters.items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value
    return message


def describe_request(parameters: Mapping[str, str | bool]) -> service_pb2.ModelInferRequest:
    """Not to generate, but to say what is there. Triton wants one input all the same."""
    message = service_pb2.ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="stream", datatype="BOOL", shape=(1, 1))
    message.raw_input_contents.append(struct.pack(FORMATS["BOOL"], False))
    for name in OUTPUTS:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        else:
            message.parameters[name].string_param = value
    return message


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return len(raw).to_bytes(4, "little") + raw
