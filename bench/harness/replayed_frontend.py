"""A gRPC server that answers as the model `conductor` does, with prepared tokens.

It isolates a gateway: no model computes, so a stream is as fast, or as evenly paced, as a test or a
measurement needs. The request's `max_tokens` sets the number of tokens. Its text selects errors:
`fail:WORDS` before the first token, `break:WORDS` after the third one, `silent` forever; after the
last one `late:WORDS`, `abort:` aborts the call, `linger:` keeps it open. With `say:WORDS`, the
answer is WORDS, in tokens of PIECE_CHARACTERS. Of several answers (`num_return_sequences`), the
later ones have higher logprobs, and their number in each text. Calls whose client left are counted.

    python -m bench.harness.replayed_frontend --address 127.0.0.1:9001

Not here: Triton (loadtest/harness/server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

import grpc
import typer
from tritonclient.grpc import service_pb2, service_pb2_grpc

from backends.tensors import CHARGE, CLUSTER

TOKEN_TEXT = " word"
PIECE_CHARACTERS = 5
TOKENS_DEFAULT = 8
BROKEN_AFTER = 3
TOKEN_ID, LOG_PROB = 261, -0.5
PROMPT_LOG_PROB, PROMPT_RANK = -2.0, 7
NO_PROMPT: Mapping[str, bytes] = {}
DECISION = '{"prefill":"prefill_0","decode":"decode_0"}'
FACTS = {"block_tokens": 64, "context_tokens_max": 8_192, "vocabulary_tokens": 2_048}


class ReplayedFrontend(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`interval_s`: between tokens of a stream; 0: as fast as the client reads."""

    def __init__(self, interval_s: float = 0.0) -> None:
        self.interval_s = interval_s
        self.is_ready = True
        self.described = "{}"  # JSON description of its cluster
        self.charge = ""  # the error of a charge; "": the charge succeeds
        self.reasoning_parser = ""  # parameter of its conductor; "": not set
        self.cancelled = 0
        self.requests: list[service_pb2.ModelInferRequest] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> int:
        self._server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return port

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def wait(self) -> None:
        assert self._server is not None
        await self._server.wait_for_termination()

    async def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: object
    ) -> service_pb2.ModelReadyResponse:
        return service_pb2.ModelReadyResponse(ready=self.is_ready)

    async def ModelConfig(
        self, request: service_pb2.ModelConfigRequest, context: object
    ) -> service_pb2.ModelConfigResponse:
        answer = service_pb2.ModelConfigResponse()
        answer.config.parameters["checkpoint"].string_value = "demo"
        answer.config.parameters["reasoning_parser"].string_value = self.reasoning_parser
        return answer

    async def ModelStreamInfer(
        self,
        requests: AsyncIterator[service_pb2.ModelInferRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        try:
            async for request in requests:
                self.requests = [*self.requests[-99:], request]
                answers = _integer(_inputs(request).get("num_return_sequences", b"")) or 1
                async for response in self._answer(request):
                    yield response
                    for index in range(1, answers):
                        yield _of_answer(response, index)
                verb, _, words = _text(_inputs(request)).partition(":")
                if verb == "late":
                    yield service_pb2.ModelStreamInferResponse(error_message=words)
                elif verb == "abort":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is gone")
                elif verb == "linger":
                    await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(
        self, request: service_pb2.ModelInferRequest
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        outputs = [each.name for each in request.outputs]
        if "describe" in request.parameters:
            verb = request.parameters["describe"].string_param
            if verb == CHARGE and self.charge:
                yield service_pb2.ModelStreamInferResponse(error_message=self.charge)
                return
            is_cluster = verb == CLUSTER
            said_of_it = self.described if is_cluster else json.dumps(FACTS)
            yield response(outputs, said_of_it, "described", 0, 0)
            return
        said = _inputs(request)
        tokens = _integer(said.get("max_tokens", b"")) or TOKENS_DEFAULT
        verb, _, words = _text(said).partition(":")
        if verb == "silent":
            await asyncio.Event().wait()
        if verb == "fail":
            yield service_pb2.ModelStreamInferResponse(error_message=words)
            return
        top = _integer(said.get("top_logprobs", b""))
        of_prompt = _of_prompt(said)
        if verb == "say":
            for message in _said(words, tokens if "max_tokens" in said else len(words)):
                yield response(outputs, *message, top)
            return
        if not said.get("stream", b"\0")[0]:
            yield response(outputs, TOKEN_TEXT * tokens, "length", tokens, top, of_prompt)
            return
        plain = response(outputs, TOKEN_TEXT, "", 1, top)
        for number in range(tokens - 1):
            if verb == "break" and number == BROKEN_AFTER:
                yield service_pb2.ModelStreamInferResponse(error_message=words)
                return
            yield plain if number else response(outputs, TOKEN_TEXT, "", 1, top, of_prompt)
            if self.interval_s:
                await asyncio.sleep(self.interval_s)
        yield response(
            outputs, TOKEN_TEXT, "length", 1, top, NO_PROMPT if tokens > 1 else of_prompt
        )


def _of_prompt(said: dict[str, bytes]) -> dict[str, bytes]:
    """Logprobs of the prompt. Token ids of a text are its bytes. The best tokens are 1, 2, ..."""
    raw = said.get("input_ids", b"")
    ids = struct.unpack(f"<{len(raw) // 4}i", raw) or tuple(_text(said).encode())
    tokens, top = len(ids), _integer(said.get("prompt_logprobs", b""))
    return {
        "prompt_ids": struct.pack(f"<{tokens}i", *ids),
        "prompt_log_probs": struct.pack("<f", PROMPT_LOG_PROB) * tokens,
        "prompt_ranks": struct.pack("<i", PROMPT_RANK) * tokens,
        "prompt_top_token_ids": struct.pack(f"<{top}i", *range(1, top + 1)) * tokens,
        "prompt_top_log_probs": struct.pack("<f", LOG_PROB) * (top * tokens),
    }


def _of_answer(
    first: service_pb2.ModelStreamInferResponse, index: int
) -> service_pb2.ModelStreamInferResponse:
    """The response of a further answer: its text and logprobs differ from those of the first."""
    made = service_pb2.ModelStreamInferResponse()
    made.CopyFrom(first)
    raw = made.infer_response.raw_output_contents
    for at, output in enumerate(made.infer_response.outputs):
        if output.name == "text_output":
            raw[at] = _string(raw[at][4:].decode() + str(index))
        elif output.name == "sequence_index":
            raw[at] = struct.pack("<i", index)
        elif output.name == "output_log_probs":
            raw[at] = struct.pack("<f", LOG_PROB / (1 + index)) * (len(raw[at]) // 4)
    return made


def _said(words: str, tokens_max: int) -> list[tuple[str, str, int]]:
    """(text, finish reason, tokens) of each message of an answer with these words."""
    starts = range(0, len(words), PIECE_CHARACTERS)
    pieces = [words[at : at + PIECE_CHARACTERS] for at in starts]
    reason = "end_id" if len(pieces) <= tokens_max else "length"
    kept = pieces[:tokens_max]
    return [(piece, "", 1) for piece in kept[:-1]] + [(kept[-1], reason, 1)]


def response(
    outputs: list[str],
    text: str,
    finish_reason: str,
    tokens: int,
    top: int,
    of_prompt: Mapping[str, bytes] = NO_PROMPT,
) -> service_pb2.ModelStreamInferResponse:
    values = {
        "text_output": ("BYTES", _string(text)),
        "finish_reason": ("BYTES", _string(finish_reason)),
        "num_output_tokens": ("INT32", struct.pack("<i", tokens)),
        "num_input_tokens": ("INT32", struct.pack("<i", 5)),
        "cached_tokens": ("INT32", struct.pack("<i", 2)),
        "sequence_index": ("INT32", struct.pack("<i", 0)),
        "decision": ("BYTES", _string(DECISION if finish_reason else "")),
        "output_ids": ("INT32", struct.pack("<i", TOKEN_ID) * tokens),
        "output_log_probs": ("FP32", struct.pack("<f", LOG_PROB) * tokens),
        "top_token_ids": ("INT32", struct.pack("<i", TOKEN_ID) * (tokens * top)),
        "top_log_probs": ("FP32", struct.pack("<f", LOG_PROB) * (tokens * top)),
    }
    made = service_pb2.ModelStreamInferResponse()
    for name in outputs:
        if name.startswith("prompt_"):
            datatype = "FP32" if "log_probs" in name else "INT32"
            raw = of_prompt.get(name, b"")
        else:
            datatype, raw = values[name]
        made.infer_response.outputs.add(name=name, datatype=datatype, shape=(1, 1))
        made.infer_response.raw_output_contents.append(raw)
    return made


def _inputs(request: service_pb2.ModelInferRequest) -> dict[str, bytes]:
    return dict(
        zip([each.name for each in request.inputs], request.raw_input_contents, strict=True)
    )


def _text(said: dict[str, bytes]) -> str:
    if "messages" in said:
        return str(json.loads(said["messages"][4:])[-1]["content"])
    return said.get("text_input", b"    ")[4:].decode()


def _string(text: str) -> bytes:
    return len(text.encode()).to_bytes(4, "little") + text.encode()


def _integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def main(
    address: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:9001",
    interval_s: Annotated[float, typer.Option(help="Between tokens; 0: none.")] = 0.0,
) -> None:
    """Answer until the process is ended."""

    async def run() -> None:
        frontend = ReplayedFrontend(interval_s)
        await frontend.start(address)
        print("ready", flush=True)
        await frontend.wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    typer.run(main)
