"""gRPC to one model of one Triton: messages for every client, and the client for asyncio.

Each request has a ModelStreamInfer stream. Hundreds may be in flight; they are spread over a few
connections, because one thread of the server serves one HTTP/2 connection. The generated stub is
called instead of tritonclient's InferenceServerClient, which copies each token once more in the
process that takes the times.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Callable

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

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
from mooncake_store.keys.curve import is_loopback

PROBE_S_MAX = 10.0
MESSAGE_BYTES_MAX = 2**31 - 1
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels share one connection
]


def channel_options(address: str) -> list[tuple[str, int]]:
    """Options of a channel to HOST:PORT; a loopback address needs no proxy."""
    is_direct = is_loopback(address)
    return [*CHANNEL_OPTIONS, *([("grpc.enable_http_proxy", 0)] if is_direct else [])]


class TritonClient:
    """Sends requests. Use it inside one event loop."""

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
        self._channels = [
            grpc.aio.insecure_channel(url, options=channel_options(url)) for _ in range(channels)
        ]
        self._stubs = itertools.cycle(
            [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        )

    async def __aenter__(self) -> TritonClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def model_parameters(self) -> dict[str, str]:
        """The parameters of the model's config.pbtxt, as text."""
        asked = service_pb2.ModelConfigRequest(name=self.model)
        try:
            answer = await next(self._stubs).ModelConfig(asked, timeout=PROBE_S_MAX)
        except grpc.RpcError as error:
            is_lost = connection_error(error, self.url).kind != "server_error"
            is_model_known = not is_lost or "not ready" in (error.details() or "")
            kind = "unavailable" if is_model_known else "unreachable"
            raise ServerError(kind, f"{self.url}: {error.details()}") from error
        return {name: value.string_value for name, value in answer.config.parameters.items()}

    async def generate(
        self, request: GenerateRequest, timeout_s: float = REQUEST_S_MAX
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of one request as they arrive. Leaving the loop early cancels the request."""
        message = infer_request(self.model, request)
        call = next(self._stubs).ModelStreamInfer(iter((message,)), timeout=timeout_s)
        is_finished = False
        try:
            async for response in call:
                if (event := stream_event(response, self._now_s())) is not None:
                    is_finished = is_finished or bool(event.finish_reason)
                    yield event
        except grpc.RpcError as error:
            raise connection_error(error, self.url) from error
        finally:
            call.cancel()
        if not is_finished:
            raise ServerError("incomplete", "the stream ended without a finish reason")


def infer_request(
    model: str, request: GenerateRequest, outputs: tuple[str, ...] = ()
) -> service_pb2.ModelInferRequest:
    """Without `outputs` the server sends all outputs that it has."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    for name, datatype, array in tensors(request):
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = array.tobytes()
        if datatype == "BYTES":
            raw = b"".join(len(item).to_bytes(4, "little") + item for item in array.flat)
        message.raw_input_contents.append(raw)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in parameters(request).items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value
    return message


def stream_event(
    response: service_pb2.ModelStreamInferResponse, time_s: float
) -> TokenEvent | None:
    """The event of a response; None for an empty last response."""
    if response.error_message:
        raise server_error(response.error_message)
    if not response.infer_response.outputs:
        return None
    return parse_response(response.infer_response, time_s)


def connection_error(error: grpc.RpcError, url: str) -> ServerError:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerError("timeout", f"{url}: no complete answer in time")
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerError("unreachable", f"{url}: {details}")
    return ServerError("server_error", f"{url}: {code.name} {details}")
