"""Sends over gRPC: one ModelStreamInfer stream for each request, on a few connections.

The generated stub is called, not tritonclient's InferenceServerClient: that one has a thread and a
queue for each stream, a second hand-over for every token in the process that takes the times.

Not here: what the messages mean (loadtest/client/protocol.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from loadtest.users import gevent_grpc  # noqa: F401  isort: skip  before grpc

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.client.protocol import (
    CHANNELS,
    GenerateRequest,
    ServerError,
    TokenEvent,
    parameters,
    parse_response,
    server_error,
    tensors,
)
from loadtest.client.triton_client import CHANNEL_OPTIONS, connection_error

OUTPUTS = (
    "output_ids",
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "cached_tokens",
    "decision",
)


class GrpcSender:
    """To one model of one Triton."""

    def __init__(self, url: str, model: str, now_s: Callable[[], float]) -> None:
        self._url = url
        self._model = model
        self._now_s = now_s
        self._channels = [grpc.insecure_channel(url, CHANNEL_OPTIONS) for _ in range(CHANNELS)]
        self._stubs = itertools.cycle(
            [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        )

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        message = infer_request(self._model, request)
        call = next(self._stubs).ModelStreamInfer(iter((message,)), timeout=timeout_s)
        is_finished = False
        try:
            for response in call:
                time_s = self._now_s()
                if response.error_message:
                    raise server_error(response.error_message)
                if response.infer_response.outputs:  # the last may only say that it is the last
                    event = parse_response(response.infer_response, time_s)
                    is_finished = is_finished or bool(event.finish_reason)
                    yield event
        except grpc.RpcError as error:
            raise connection_error(error, self._url) from None
        finally:
            call.cancel()
        if not is_finished:
            raise ServerError("incomplete", "the stream ended without a finish reason")

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def infer_request(model: str, request: GenerateRequest) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    for name, datatype, array in tensors(request):
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = array.tobytes()
        if datatype == "BYTES":
            raw = b"".join(len(item).to_bytes(4, "little") + item for item in array.flat)
        message.raw_input_contents.append(raw)
    for name in OUTPUTS:
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
