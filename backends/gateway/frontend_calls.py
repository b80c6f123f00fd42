"""Calls to the frontend's Triton: one ModelStreamInfer for each request, and readiness probes.

The calls use gRPC's generated stub directly, because each layer would cost time per token. Requests
are spread over CHANNELS connections, because Triton serves each HTTP/2 connection with one thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends.errors import CONTEXT_EXCEEDED
from backends.gateway.answer.logprobs import PieceLogprobs, PromptWriter
from backends.gateway.answer.pieces import AnswerPiece
from backends.gateway.request.infer_request import (
    ANSWER,
    COUNTS,
    LOGPROBS,
    MODEL,
    NAME_OF_TENSOR,
    TOKEN_IDS,
    GatewayRequest,
    describe_request,
    infer_request,
)
from backends.gateway.request.tool_use import BY_TEMPLATE
from backends.statuses import HttpRefusal, of_message, unavailable
from backends.tensors import PROMPT_OUTPUTS

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
    reasoning_parser: str = BY_TEMPLATE  # parameter of the conductor's config.pbtxt


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
        self, request: GatewayRequest, request_id: str, prompts: Sequence[PromptWriter] = ()
    ) -> FrontendCall | SeveralCalls:
        """Start the call for each prompt of the request. `prompts`: as in FrontendCall, for the
        answers to all prompts."""
        calls, answers = [], request.answers
        for prompt in range(len(request.prompts)):
            call_id = f"{request_id}-{prompt}" if prompt else request_id
            message = infer_request(request, call_id, prompt)
            stream = next(self._stubs).ModelStreamInfer(iter((message,)))
            names = dict(request.names)
            if len(request.prompts) > 1:
                names |= dict.fromkeys(("prompt", "text_input", "input_ids"), f"prompt[{prompt}]")
            of_prompt = prompts[prompt * answers : (prompt + 1) * answers]
            returns_ids = request.returns_token_ids
            calls.append(FrontendCall(stream, names, answers, of_prompt, returns_ids))
        return calls[0] if len(calls) == 1 else SeveralCalls(calls, answers)

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
                thinking = config.parameters["reasoning_parser"].string_value or BY_TEMPLATE
                self.served = ServedModel(name, checkpoint, parser, thinking)
            self.is_ready = answer.ready  # set after `served`, which a ready gateway needs
        except grpc.RpcError:
            self.is_ready = False
        return self.is_ready


class FrontendCall:
    """One request at the conductor. Iteration raises HttpRefusal for an error."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        names: Mapping[str, str],
        answers: int = 1,
        prompts: Sequence[PromptWriter] = (),
        returns_token_ids: bool = False,
    ) -> None:
        """`names`: tensor -> field, where the field differs from NAME_OF_TENSOR. `prompts`: one for
        each answer whose first piece has its prompt."""
        self._call, self._names, self._prompts = call, names, prompts
        self._unfinished, self._returns_token_ids = answers, returns_token_ids
        self.is_left = False

    def leave(self) -> None:
        """Cancel the call if it is open, so that the conductor ends the request."""
        self.is_left = True
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        """Yield pieces until the conductor closes the call.

        The last piece of each answer has a finish reason. Failures after the last of all are
        ignored, and the call is cancelled after END_S_MAX. `leave` before the last piece makes
        iteration raise CancelledError.
        """
        is_finished, end = False, None
        try:
            async for response in self._call:
                if is_finished:
                    continue
                if response.error_message:
                    raise refusal_of(response.error_message, self._names)
                if response.infer_response.outputs:
                    found = piece(response.infer_response, self._returns_token_ids)
                    if self._prompts:
                        found = await self._with_prompt(found, response.infer_response)
                    self._unfinished -= bool(found.finish_reason)
                    if not self._unfinished:
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

    async def _with_prompt(
        self, found: AnswerPiece, response: service_pb2.ModelInferResponse
    ) -> AnswerPiece:
        writer = self._prompts[found.index]
        if writer.is_begun:
            return with_prompt(found, writer, response)
        # In a thread, because a prompt may be long.
        return await asyncio.to_thread(with_prompt, found, writer, response)


class SeveralCalls:
    """The calls for several prompts of one request. Iteration is as that of a FrontendCall, and
    the answers are numbered in the order of the prompts."""

    def __init__(self, calls: Sequence[FrontendCall], answers: int) -> None:
        self._calls, self._answers = calls, answers
        self.is_left = False

    def leave(self) -> None:
        self.is_left = True
        for call in self._calls:
            call.leave()

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        pieces: asyncio.Queue[AnswerPiece | None] = asyncio.Queue()

        async def read(prompt: int, call: FrontendCall) -> None:
            async for found in call:
                index = prompt * self._answers + found.index
                pieces.put_nowait(found._replace(index=index))

        reading = asyncio.gather(*(read(*each) for each in enumerate(self._calls)))
        reading.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (found := await pieces.get()) is not None:
                yield found
            await reading
        finally:
            reading.cancel()


def _raw(response: service_pb2.ModelInferResponse) -> dict[str, bytes]:
    names = [each.name for each in response.outputs]
    return dict(zip(names, response.raw_output_contents, strict=True))


def piece(response: service_pb2.ModelInferResponse, returns_token_ids: bool = False) -> AnswerPiece:
    raw = _raw(response)
    logprobs = _logprobs(raw, LOGPROBS) if "output_log_probs" in raw else None
    text, reason = raw["text_output"][4:], raw["finish_reason"][4:].decode()
    decision = raw["decision"][4:] if "decision" in raw else b""
    index = int.from_bytes(raw[ANSWER], "little") if ANSWER in raw else 0
    found = AnswerPiece(text, reason, logprobs=logprobs, decision=decision, index=index)
    if returns_token_ids:
        ids = [np.frombuffer(raw[name], np.int32).tolist() for name in TOKEN_IDS]
        found = found._replace(token_ids=ids[0], prompt_ids=ids[1])
    if COUNTS[0] not in raw:
        return found
    output, prompt, cached = (int.from_bytes(raw[name], "little", signed=True) for name in COUNTS)
    return found._replace(output_tokens=output, prompt_tokens=prompt, cached_tokens=cached)


def _logprobs(raw: Mapping[str, bytes], names: Sequence[str]) -> PieceLogprobs:
    token_ids, log_probs, top_ids, top_log_probs = (raw[name] for name in names)
    ids = np.frombuffer(token_ids, np.int32)
    shape = (len(ids), -1 if len(ids) else 0)
    return PieceLogprobs(
        ids.tolist(),
        np.frombuffer(log_probs, np.float32).tolist(),
        np.frombuffer(top_ids, np.int32).reshape(shape).tolist(),
        np.frombuffer(top_log_probs, np.float32).reshape(shape).tolist(),
    )


def with_prompt(
    found: AnswerPiece, writer: PromptWriter, response: service_pb2.ModelInferResponse
) -> AnswerPiece:
    """The piece after the part of the answer that is about its prompt."""
    if writer.use.is_alone:
        logprobs = found.logprobs and PieceLogprobs([], [], [], [])
        reason = "length" if found.finish_reason else ""
        token_ids = found.token_ids and []
        found = found._replace(
            text=b"", finish_reason=reason, output_tokens=0, logprobs=logprobs, token_ids=token_ids
        )
    raw, prompt, ranks = _raw(response), None, b""
    if raw.get(PROMPT_OUTPUTS[4]):  # in the first response only
        prompt, ranks = _logprobs(raw, PROMPT_OUTPUTS[:4]), raw[PROMPT_OUTPUTS[4]]
    text, listed = writer.begin(prompt, np.frombuffer(ranks, np.int32).tolist())
    return found._replace(text=text + found.text, prompt_logprobs=listed)


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
