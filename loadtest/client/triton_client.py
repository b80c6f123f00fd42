"""An asyncio client of the `conductor` model: one gRPC stream for each request.

Hundreds of requests may be in flight; they are spread over a few connections, because one HTTP/2
connection is served by one thread of the server.

Not here: what the messages and errors mean (protocol.py), when to send (open_loop.py), what the
times mean (metrics.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from loadtest.client.protocol import (
    CHANNELS,
    REQUEST_S_MAX,
    GenerateRequest,
    ServerError,
    TokenEvent,
    parameters,
    parse_response,
    server_error,
    tensors,
)

PROBE_S_MAX = 10.0
MESSAGE_BYTES_MAX = 2**31 - 1
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels share one connection
]


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
        self.url = url
        self.model = model
        self._now_s = now_s
        self._clients = [
            triton_aio.InferenceServerClient(url, channel_args=CHANNEL_OPTIONS)
            for _ in range(channels)
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
            raise connection_error(error, self.url) from error
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
        return {
            "model_name": self.model,
            "inputs": inputs,
            "request_id": request.request_id,
            "parameters": parameters(request),
        }


async def _once(arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield arguments


def connection_error(error: grpc.RpcError, url: str) -> ServerError:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerError("timeout", f"{url}: no complete answer in time")
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerError("unreachable", f"{url}: {details}")
    return ServerError("server_error", f"{url}: {code.name} {details}")
