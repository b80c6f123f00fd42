"""Calls to the frontend's Triton: one ModelStreamInfer for each request, and what is served there.

The generated stub over asyncio, with nothing in between: a message is parsed once and its tensors
are read where they lie. Requests are spread over a few connections, because one HTTP/2 connection
is served by one thread of Triton. Not here: what a request asks for (infer_request.py).
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

from backends.gateway.events import AnswerPiece
from backends.gateway.infer_request import MODEL, NAME_OF_TENSOR, describe_request
from backends.gateway.logprobs import PieceLogprobs
from backends.statuses import HttpRefusal, of_message, unavailable
from backends.tensors import CHARGE, CLUSTER

CHANNELS = 4
MESSAGE_BYTES_MAX = 2**31 - 1
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels share one connection
    ("grpc.enable_http_proxy", 0),  # the frontend is near, whatever http_proxy says
    ("grpc.max_reconnect_backoff_ms", 1000),  # a frontend that is started again is found soon
]
OF_PROMPT = ("the prompt ", "there is no prompt")  # how problems begin that name no tensor
PROBE_S_MAX, PROBE_EVERY_S = 2.0, 1.0
END_S_MAX = 5.0  # that the conductor may keep a call open behind the last piece


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the conductor serves now."""

    name: str  # the last part of the checkpoint's path
    checkpoint: str  # as its config.pbtxt says


class FrontendCalls:
    """Use it inside one event loop; `watch` keeps `served` and `is_ready` true."""

    def __init__(self, address: str, channels: int = CHANNELS) -> None:
        self.address = address
        self._channels = [
            grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(channels)
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
        """`names`: of fields that this request names in a way of its own, by tensor."""
        return FrontendCall(next(self._stubs).ModelStreamInfer(iter((message,))), names)

    async def describe_cluster(self, parameters: Mapping[str, str]) -> bytes:
        """What the frontend knows of it, as JSON. HttpRefusal when it says nothing."""
        return await self._describe({**parameters, "describe": CLUSTER})

    async def charge(self, parameters: Mapping[str, str]) -> None:
        """Count one request of a tenant's. HttpRefusal where its limits are used up."""
        await self._describe({**parameters, "describe": CHARGE})

    async def describe_model(self) -> dict[str, Any]:
        """What the conductor says of what it serves; empty when it says nothing."""
        try:
            said = msgspec.json.decode(await self._describe({"describe": True}))
        except (HttpRefusal, msgspec.DecodeError):
            return {}
        return said if isinstance(said, dict) else {}

    async def _describe(self, parameters: Mapping[str, str | bool]) -> bytes:
        message = describe_request(parameters)
        call = FrontendCall(self._probe.ModelStreamInfer(iter((message,)), timeout=PROBE_S_MAX), {})
        return b"".join([piece.text async for piece in call])

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            begun_s = time.monotonic()
            await self.probe()
            await asyncio.sleep(max(0.0, PROBE_EVERY_S - (time.monotonic() - begun_s)))

    async def probe(self, waits: bool = False) -> bool:
        """Does the conductor serve? Also learns what. `waits`: for a connection, where gRPC would
        not even try for a while because the last attempt failed."""
        asked = service_pb2.ModelConfigRequest(name=MODEL)
        ready = service_pb2.ModelReadyRequest(name=MODEL)
        try:
            answer = await self._probe.ModelReady(ready, timeout=PROBE_S_MAX, wait_for_ready=waits)
            if answer.ready:
                config = (await self._probe.ModelConfig(asked, timeout=PROBE_S_MAX)).config
                checkpoint = config.parameters["checkpoint"].string_value or "demo"
                name = checkpoint.rstrip("/").rpartition("/")[2]
                self.served = ServedModel(name, checkpoint)
            self.is_ready = answer.ready  # and not before it is known what is served
        except grpc.RpcError:
            self.is_ready = False
        return self.is_ready


class FrontendCall:
    """One request at the conductor. Iterating over it raises HttpRefusal for an error."""

    def __init__(self, call: grpc.aio.StreamStreamCall, names: Mapping[str, str]) -> None:
        self._call, self._names = call, names
        self.is_left = False

    def leave(self) -> None:
        """The client has gone: the conductor hears of it and frees what the request has."""
        self.is_left = True
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        """Until the conductor has closed it, which it does soon behind the last piece; what fails
        behind that fails nobody. asyncio's own CancelledError after `leave`."""
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
            self._call.cancel()  # of one that has ended: nothing
        if not is_finished:
            raise unavailable("the frontend ended the answer before its end; ask again")


def piece(response: service_pb2.ModelInferResponse) -> AnswerPiece:
    raw = dict(
        zip([each.name for each in response.outputs], response.raw_output_contents, strict=True)
    )
    logprobs = _logprobs(raw) if "output_log_probs" in raw else None
    counts = raw.get("num_output_tokens")
    text, reason = raw["text_output"][4:], raw["finish_reason"][4:].decode()
    decision = raw["decision"][4:] if "decision" in raw else b""
    if counts is None:
        return AnswerPiece(text, reason, logprobs=logprobs, decision=decision)
    return AnswerPiece(
        text,
        reason,
        _integer(counts),
        _integer(raw["num_input_tokens"]),
        _integer(raw["cached_tokens"]),
        logprobs,
        decision,
    )


def _logprobs(raw: Mapping[str, bytes]) -> PieceLogprobs:
    ids = np.frombuffer(raw["output_ids"], np.int32)
    shape = (len(ids), -1 if len(ids) else 0)
    return PieceLogprobs(
        ids.tolist(),
        np.frombuffer(raw["output_log_probs"], np.float32).tolist(),
        np.frombuffer(raw["top_token_ids"], np.int32).reshape(shape).tolist(),
        np.frombuffer(raw["top_log_probs"], np.float32).reshape(shape).tolist(),
    )


def _integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def refusal_of(message: str, names: Mapping[str, str]) -> HttpRefusal:
    """With the name of the client's field in place of the conductor's tensor."""
    refusal = of_message(message)
    if refusal.status != 400:
        return refusal
    words = refusal.message.removeprefix("parameter ")
    if words.startswith(OF_PROMPT):
        return HttpRefusal(400, refusal.code, words, names.get("prompt", "prompt"))
    length = next((at for at, character in enumerate(words) if character in " :,["), len(words))
    tensor = words[:length]
    name = names.get(tensor) or NAME_OF_TENSOR.get(tensor)
    if name is None:
        return refusal
    said = f"{name}{words[length:]}"
    return HttpRefusal(400, refusal.code, said, name)


def broken(error: grpc.RpcError) -> HttpRefusal:
    """The connection failed, not the request."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return HttpRefusal(413, "too_large_body", details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return unavailable(f"the frontend does not answer: {details}")
    return of_message(details)
