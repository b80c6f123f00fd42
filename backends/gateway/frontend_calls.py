"""Calls to the frontend's Triton: one ModelStreamInfer for each request, and readiness probes.

The calls use gRPC's generated stub directly, because each layer would cost time per token. Requests
are spread over CHANNELS connections, because Triton serves each HTTP/2 connection with one thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends.errors import CONTEXT_EXCEEDED
from backends.gateway.events import AnswerPiece
from backends.gateway.infer_request import (
    COUNTS,
    MODEL,
    NAME_OF_TENSOR,
    TOKEN_IDS,
    describe_request,
)
from backends.gateway.logprobs import PieceLogprobs
from backends.gateway.tool_use import BY_TEMPLATE
from backends.statuses import HttpRefusal, of_message, unavailable

CHANNELS = 4
MESSAGE_BYTES_MAX = 2**31 - 1
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # gives each channel its own connection
    ("grpc.enable_http_proxy", 0),  # the variable http_proxy does not apply to the frontend
    ("grpc.max_reconnect_backoff_ms", 1000),  # reconnects soon to a restarted frontend
]
# Beginnings of errors about the prompt.
OF_PROMPT = ("the prompt ", "there is no prompt", CONTEXT_EXCEEDED)
PROBE_S_MAX, PROBE_EVERY_S = 2.0, 1.0  # timeout and period of probes, in seconds
END_S_MAX = 5.0  # seconds from an answer's last piece until its call is cancelled, if still open


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the conductor serves."""

    name: str  # the last part of the checkpoint's path
    checkpoint: str  # parameter of the conductor's config.pbtxt; "demo" if it is missing
    tool_call_parser: str = BY_TEMPLATE  # parameter of the conductor's config.pbtxt


class FrontendCalls:
    """The calls of one event loop. `watch` updates `served` and `is_ready`."""

    def __init__(self, address: str) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(CHANNELS)
        ]
        stubs = [service_pb2_grpc.GRPCInferenceServiceStub(each) for each in self._channels]
        self._stubs = itertools.cycle(stubs)
        self._probe = stubs[0]
        self.is_ready = False
        self.served: ServedModel | None = None

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def start(
        self, message: service_pb2.ModelInferRequest, names: Mapping[str, str]
    ) -> FrontendCall:
        """Start a call. `names`: tensor -> field, where the field differs from NAME_OF_TENSOR."""
        return FrontendCall(next(self._stubs).ModelStreamInfer(iter((message,))), names)

    async def describe_model(self) -> dict[str, Any]:
        """The conductor's description of its model; {} if the call fails or returns no object."""
        try:
            facts = msgspec.json.decode(await self.describe(True, {}))
        except (HttpRefusal, msgspec.DecodeError):
            return {}
        return facts if isinstance(facts, dict) else {}

    async def describe(self, what: str | bool, parameters: Mapping[str, str]) -> bytes:
        """The JSON answer to a call with the parameter `describe`. `what`: True returns properties
        of the model, CLUSTER the cluster's state; CHARGE charges one request to a tenant. Raises
        HttpRefusal if the call fails, or if the tenant's limits are used up."""
        message = describe_request({**parameters, "describe": what})
        call = FrontendCall(self._probe.ModelStreamInfer(iter((message,)), timeout=PROBE_S_MAX), {})
        return b"".join([piece.text async for piece in call])

    async def watch(self) -> None:
        """Probe every PROBE_EVERY_S until the task is cancelled."""
        while True:
            begun_s = time.monotonic()
            await self.probe()
            await asyncio.sleep(max(0.0, PROBE_EVERY_S - (time.monotonic() - begun_s)))

    async def probe(self, waits: bool = False) -> bool:
        """Update and return `is_ready`, and update `served`. `waits` False: the probe fails at once
        while gRPC waits before it reconnects."""
        config_call = service_pb2.ModelConfigRequest(name=MODEL)
        ready = service_pb2.ModelReadyRequest(name=MODEL)
        try:
            answer = await self._probe.ModelReady(ready, timeout=PROBE_S_MAX, wait_for_ready=waits)
            if answer.ready:
                answered = await self._probe.ModelConfig(config_call, timeout=PROBE_S_MAX)
                config = answered.config
                checkpoint = config.parameters["checkpoint"].string_value or "demo"
                name = checkpoint.rstrip("/").rpartition("/")[2]
                parser = config.parameters["tool_call_parser"].string_value or BY_TEMPLATE
                self.served = ServedModel(name, checkpoint, parser)
            self.is_ready = answer.ready  # set after `served`, which a ready gateway needs
        except grpc.RpcError:
            self.is_ready = False
        return self.is_ready


class FrontendCall:
    """One request at the conductor. Iteration raises HttpRefusal for an error."""

    def __init__(self, call: grpc.aio.StreamStreamCall, names: Mapping[str, str]) -> None:
        self._call, self._names = call, names
        self.is_left = False

    def leave(self) -> None:
        """Cancel the call if it is open, so that the conductor ends the request."""
        self.is_left = True
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        """Yield pieces until the conductor closes the call.

        The last piece has a finish reason. Failures after it are ignored, and the call is cancelled
        after END_S_MAX. `leave` before the last piece makes iteration raise CancelledError.
        """
        is_finished, end = False, None
        try:
            async for response in self._call:
                if is_finished:
                    continue
                if response.error_message:
                    raise refusal_of(response.error_message, self._names)
                if response.infer_response.outputs:
                    found = piece(response.infer_response)
                    if found.finish_reason:
                        is_finished = True
                        end = asyncio.get_running_loop().call_later(END_S_MAX, self.leave)
                    yield found
        except grpc.RpcError as error:
            if not is_finished:
                raise broken(error) from None
        except asyncio.CancelledError:
            if not (is_finished and self.is_left):
                raise
        finally:
            if end is not None:
                end.cancel()
            self._call.cancel()  # has no effect on a closed call
        if not is_finished:
            raise unavailable("the frontend closed the answer before its end; retry")


def piece(response: service_pb2.ModelInferResponse) -> AnswerPiece:
    raw = dict(
        zip([each.name for each in response.outputs], response.raw_output_contents, strict=True)
    )
    logprobs = _logprobs(raw) if "output_log_probs" in raw else None
    text, reason = raw["text_output"][4:], raw["finish_reason"][4:].decode()
    decision = raw["decision"][4:] if "decision" in raw else b""
    ids: list[Any] = [None, None]
    if "prompt_ids" in raw:
        ids = [np.frombuffer(raw[name], np.int32).tolist() for name in TOKEN_IDS]
    if COUNTS[0] not in raw:
        return AnswerPiece(text, reason, 0, 0, 0, logprobs, decision, *ids)
    output, prompt, cached = (int.from_bytes(raw[name], "little", signed=True) for name in COUNTS)
    return AnswerPiece(text, reason, output, prompt, cached, logprobs, decision, *ids)


def _logprobs(raw: Mapping[str, bytes]) -> PieceLogprobs:
    ids = np.frombuffer(raw["output_ids"], np.int32)
    shape = (len(ids), -1 if len(ids) else 0)
    return PieceLogprobs(
        ids.tolist(),
        np.frombuffer(raw["output_log_probs"], np.float32).tolist(),
        np.frombuffer(raw["top_token_ids"], np.int32).reshape(shape).tolist(),
        np.frombuffer(raw["top_log_probs"], np.float32).reshape(shape).tolist(),
    )


def refusal_of(message: str, names: Mapping[str, str]) -> HttpRefusal:
    """The conductor's error, with the name of the client's field in place of the tensor's name."""
    refusal = of_message(message)
    if refusal.status != 400:
        return refusal
    text = refusal.message.removeprefix("parameter ")
    if text.startswith(OF_PROMPT):
        return HttpRefusal(400, refusal.code, text, names.get("prompt", "prompt"))
    length = next((at for at, character in enumerate(text) if character in " :,["), len(text))
    tensor = text[:length]
    name = names.get(tensor) or NAME_OF_TENSOR.get(tensor)
    if name is None:
        return refusal
    return HttpRefusal(400, refusal.code, f"{name}{text[length:]}", name)


def broken(error: grpc.RpcError) -> HttpRefusal:
    """The refusal for a gRPC error, for example after a failed connection or a long message."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return HttpRefusal(413, "too_large_body", details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return unavailable(f"the frontend does not answer: {details}")
    return of_message(details)
