"""An asyncio client of the `conductor` model: one gRPC stream for each request.

Translation only: a `GenerateRequest` becomes tensors, and each response becomes a `TokenEvent` with
the time it arrived. Hundreds of requests may be in flight; they are spread over a few connections,
because one HTTP/2 connection is served by one thread of the server.

Errors, by the prefix that the server writes (Triton has no status code for "try later"):

* ServerError, whose `kind` is one of
    invalid_request  "invalid_request: ..."  fix the request
    unavailable      "unavailable: ..."      a part of the server is not there
    kv_missing       "kv_missing: ..."       cached blocks got lost on the way, again and again
    server_error     any other text of the server
    unreachable      no connection, or it broke
    timeout          no complete answer in time
    incomplete       the stream ended without a finish reason
  x Rejected         "rejected kind=<reason> retry_after_s=<s>: ..."  the server chose not to serve

Not here: when to send (open_loop.py), what the times mean (metrics.py).
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

CHANNELS = 4
REQUEST_S_MAX = 600.0
PROBE_S_MAX = 10.0
MESSAGE_BYTES_MAX = 2**31 - 1
REJECTED_PREFIX = re.compile(r"rejected kind=(\S+) retry_after_s=([0-9.eE+-]+)\s*:?\s*(.*)", re.S)
KIND_PREFIX = re.compile(r"\b(invalid_request|unavailable|kv_missing):")


class ServerError(Exception):
    """The request was not served. `kind` is one of those listed in the module docstring."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Rejected(ServerError):
    """The server was able to answer and chose not to; `kind` is its reason, e.g. `ttft`."""

    def __init__(self, kind: str, message: str, retry_after_s: float) -> None:
        super().__init__(kind, message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to `conductor`: `input_ids` or `text_input`, never both. None is not sent."""

    request_id: str
    input_ids: npt.NDArray[np.int32] | None = None
    text_input: str | None = None
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
    """One response of a stream. Fields that this response did not carry are None or empty."""

    time_s: float
    output_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int | None = None
    input_tokens: int | None = None
    decision: dict[str, Any] | None = None


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


def server_error(message: str) -> ServerError:
    """The error that a message of the server stands for, told by its prefix."""
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


class TritonClient:
    """Sends requests to one model of one Triton. Use it inside one event loop."""

    def __init__(
        self,
        url: str,
        model: str = "conductor",
        channels: int = CHANNELS,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert channels > 0
        options = [
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),  # or all channels share one connection
        ]
        self.url = url
        self.model = model
        self._now_s = now_s
        self._clients = [
            triton_aio.InferenceServerClient(url, channel_args=options) for _ in range(channels)
        ]
        self._next = itertools.cycle(self._clients)

    async def __aenter__(self) -> TritonClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def model_parameters(self) -> dict[str, str]:
        """The parameters of the model's config.pbtxt, as text."""
        try:
            answer = await self._clients[0].get_model_config(self.model, client_timeout=PROBE_S_MAX)
        except triton.InferenceServerException as error:
            lost = error.status() in ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.UNAVAILABLE")
            is_model_known = not lost or "not ready" in (error.message() or "")
            kind = "unavailable" if is_model_known else "unreachable"
            raise ServerError(kind, f"{self.url}: {error.message()}") from error
        return {name: value.string_value for name, value in answer.config.parameters.items()}

    async def generate(
        self, request: GenerateRequest, timeout_s: float = REQUEST_S_MAX
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of one request as they arrive. Leaving the loop early cancels the request."""
        stream = next(self._next).stream_infer(_once(self._infer_arguments(request)), timeout_s)
        finished = False
        try:
            async for result, error in stream:
                time_s = self._now_s()
                if error is not None:
                    raise server_error(error.message() or str(error))
                event = parse_response(result.get_response(), time_s)
                finished = finished or bool(event.finish_reason)
                if result.get_response().outputs:  # the last one may only say that it is the last
                    yield event
        except grpc.RpcError as error:
            raise _connection_error(error, self.url) from error
        finally:
            stream.cancel()
        if not finished:
            raise ServerError("incomplete", "the stream ended without a finish reason")

    def _infer_arguments(self, request: GenerateRequest) -> dict[str, Any]:
        inputs = []
        for name, datatype, array in tensors(request):
            tensor = triton.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        parameters = dict(request.parameters)
        if request.priority:
            parameters["request_priority"] = request.priority
        return {
            "model_name": self.model,
            "inputs": inputs,
            "request_id": request.request_id,
            "parameters": parameters,
        }


async def _once(arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield arguments


def _connection_error(error: grpc.RpcError, url: str) -> ServerError:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerError("timeout", f"{url}: no complete answer in time")
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerError("unreachable", f"{url}: {details}")
    return ServerError("server_error", f"{url}: {code.name} {details}")
