"""The messages between a client and the `conductor` model, over gRPC and over HTTP.

Translation only, for all clients: a `GenerateRequest` becomes tensors or a JSON body, each response
becomes a `TokenEvent` with its arrival time, and each error message an exception.

Errors, by the prefix that the server writes (Triton has no status code for "try later"):

* ServerError, whose `kind` is one of
    invalid_request  "invalid_request: ..."  fix the request
    forbidden        "forbidden: ..."        with API keys: no key, or a tenant that is not proven
    unavailable      "unavailable: ..."      a part of the server is not there
    kv_missing       "kv_missing: ..."       cached blocks were lost repeatedly on the way
    server_error     any other text of the server
    unreachable      no connection, or it broke
    timeout          no complete answer in time
    incomplete       the stream ended without a finish reason
  x Rejected         "rejected kind=<reason> retry_after_s=<s>: ..."  the server chose not to serve

Not here: connections (triton_client.py with asyncio, users/ with gevent), what is posted over HTTP
(http_interfaces.py).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

CHANNELS = 4  # connections; one thread of the server serves one HTTP/2 connection
REQUEST_S_MAX = 600.0
REJECTED_PREFIX = re.compile(r"rejected kind=(\S+) retry_after_s=([0-9.eE+-]+)\s*:?\s*(.*)", re.S)
KIND_PREFIX = re.compile(r"\b(invalid_request|forbidden|unavailable|kv_missing):")


class ServerError(Exception):
    """The request was not served. `kind` is one of those in the module docstring."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Rejected(ServerError):
    """The server rejected a request that it could have served; `kind`: why, e.g. `ttft`."""

    def __init__(self, kind: str, message: str, retry_after_s: float) -> None:
        super().__init__(kind, message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to `conductor`: either `input_ids` or `text_input`. None is not sent."""

    request_id: str
    input_ids: npt.NDArray[np.int32] | None = None
    text_input: str | None = None
    # The same prompt as a conversation, for chat interfaces: roles and contents.
    messages: tuple[Mapping[str, str], ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    end_id: int | None = None  # -1: no token ends the answer
    stream: bool = True
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    return_decision: bool | None = None
    priority: int = 0
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One response of a stream. Fields that are missing in it are None or empty."""

    time_s: float
    output_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int | None = None
    input_tokens: int | None = None
    decision: dict[str, Any] | None = None
    tokens: int = 0  # their number, where the response has no ids


# name of the field and of the tensor -> Triton type, numpy type
SCALARS: dict[str, tuple[str, Any]] = {
    "max_tokens": ("INT32", np.int32),
    "min_tokens": ("INT32", np.int32),
    "end_id": ("INT32", np.int32),
    "stream": ("BOOL", np.bool_),
    "temperature": ("FP32", np.float32),
    "top_k": ("INT32", np.int32),
    "top_p": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "return_decision": ("BOOL", np.bool_),
}


def tensors(request: GenerateRequest) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """(name, Triton type, array) of each input, shaped [1, n] as `max_batch_size: 1` wants."""
    assert request.input_ids is None or request.text_input is None, "give ids or text, not both"
    found: list[tuple[str, str, npt.NDArray[Any]]] = []
    if request.input_ids is not None:
        ids = np.asarray(request.input_ids, dtype=np.int32).reshape(1, -1)
        found.append(("input_ids", "INT32", ids))
    if request.text_input is not None:
        text = np.array([[request.text_input.encode()]], dtype=np.object_)
        found.append(("text_input", "BYTES", text))
    for name, (datatype, numpy_type) in SCALARS.items():
        value = getattr(request, name)
        if value is not None:
            found.append((name, datatype, np.array([[value]], dtype=numpy_type)))
    return found


def parameters(request: GenerateRequest) -> dict[str, str | int | bool]:
    found = dict(request.parameters)
    if request.priority:
        found["request_priority"] = request.priority
    return found


def json_body(request: GenerateRequest) -> bytes:
    """The body of `generate` and `generate_stream`. Triton would reject the request's `id`."""
    body: dict[str, Any] = dict(parameters(request))
    if request.input_ids is not None:
        body["input_ids"] = np.asarray(request.input_ids).reshape(-1).tolist()
    if request.text_input is not None:
        body["text_input"] = request.text_input
    for name in SCALARS:
        if (value := getattr(request, name)) is not None:
            body[name] = value
    return json.dumps(body).encode()


def server_error(message: str) -> ServerError:
    if rejected := REJECTED_PREFIX.search(message):
        try:
            return Rejected(rejected[1], rejected[3] or message, float(rejected[2]))
        except ValueError:
            return ServerError("server_error", message)
    if known := KIND_PREFIX.search(message):
        return ServerError(known[1], message)
    return ServerError("server_error", message)


def parse_response(response: Any, time_s: float) -> TokenEvent:
    """A `ModelInferResponse` as an event. Reads raw buffers: this runs once per token."""
    found: dict[str, Any] = {}
    raw = response.raw_output_contents
    for output, content in zip(response.outputs, raw, strict=False):
        if output.datatype == "BYTES":
            found[output.name] = _strings(content)
        elif output.datatype == "INT32":
            found[output.name] = struct.unpack(f"<{len(content) // 4}i", content)
    decision = "".join(found.get("decision", ()))
    return TokenEvent(
        time_s=time_s,
        output_ids=found.get("output_ids", ()),
        text="".join(found.get("text_output", ())),
        finish_reason="".join(found.get("finish_reason", ())),
        cached_tokens=_first(found.get("cached_tokens")),
        input_tokens=_first(found.get("num_input_tokens")),
        decision=json.loads(decision) if decision else None,
    )


def parse_json(response: Mapping[str, Any], time_s: float) -> TokenEvent:
    """The JSON of one HTTP response or streamed event; raises the error that it contains."""
    if (message := response.get("error")) is not None:
        raise server_error(str(message))
    output_ids = response.get("output_ids", ())
    decision = response.get("decision")
    return TokenEvent(
        time_s=time_s,
        # a single id comes as a bare number
        output_ids=(output_ids,) if isinstance(output_ids, int) else tuple(output_ids),
        text=response.get("text_output", ""),
        finish_reason=response.get("finish_reason", ""),
        cached_tokens=response.get("cached_tokens"),
        input_tokens=response.get("num_input_tokens"),
        decision=json.loads(decision) if decision else None,
    )


def _strings(content: bytes) -> tuple[str, ...]:
    """A BYTES tensor: each element is its length (4 bytes, little endian) and its bytes."""
    found, offset = [], 0
    while offset < len(content):
        (length_bytes,) = struct.unpack_from("<I", content, offset)
        offset += 4
        found.append(content[offset : offset + length_bytes].decode("utf-8", errors="replace"))
        offset += length_bytes
    return tuple(found)


def _first(values: tuple[int, ...] | None) -> int | None:
    return values[0] if values else None
