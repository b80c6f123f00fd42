"""What users send through: gRPC or HTTP, both under gevent.

gRPC: as in client/triton_client.py, but the calls wait with gevent, not with asyncio.

HTTP: one POST to generate_stream for each request, answered by server-sent events. A refusal is
status 400 with {"error": ...}, an error after the first token one more event; both are read alike.
geventhttpclient is what tritonclient's HTTP client and Locust's fast one are made of.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator

from loadtest.users import gevent_setup  # noqa: F401  isort: skip  before grpc

import gevent
import grpc
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketResponse
from tritonclient.grpc import service_pb2_grpc

from loadtest.client.protocol import (
    CHANNELS,
    GenerateRequest,
    ServerError,
    TokenEvent,
    json_body,
    parse_json,
    server_error,
)
from loadtest.client.triton_client import (
    CHANNEL_OPTIONS,
    connection_error,
    infer_request,
    stream_event,
)
from loadtest.users.settings import LoadSettings

OUTPUTS = (
    "output_ids",
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "cached_tokens",
    "decision",
)
CONNECTIONS_MAX = 4_096  # over HTTP; no user waits for another's connection
CONNECT_S_MAX = 10.0
HEADERS = {"Content-Type": "application/json"}


def make_sender(
    settings: LoadSettings, model: str, now_s: Callable[[], float]
) -> GrpcSender | HttpSender:
    """To one model of the server; shared by all users of a process."""
    if settings.protocol == "grpc":
        return GrpcSender(settings.addresses.grpc, model, now_s)
    return HttpSender(settings.addresses.http, model, now_s)


class GrpcSender:
    def __init__(self, url: str, model: str, now_s: Callable[[], float]) -> None:
        self._url = url
        self._model = model
        self._now_s = now_s
        self._channels = [grpc.insecure_channel(url, CHANNEL_OPTIONS) for _ in range(CHANNELS)]
        self._stubs = itertools.cycle(
            [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        )

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        message = infer_request(self._model, request, OUTPUTS)
        call = next(self._stubs).ModelStreamInfer(iter((message,)), timeout=timeout_s)
        is_finished = False
        try:
            for response in call:
                if (event := stream_event(response, self._now_s())) is not None:
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


class HttpSender:
    def __init__(self, url: str, model: str, now_s: Callable[[], float]) -> None:
        host, _, port = url.rpartition(":")
        self._url = url
        self._path = f"/v2/models/{model}/generate_stream"
        self._now_s = now_s
        self._client = HTTPClient(
            host,
            int(port),
            concurrency=CONNECTIONS_MAX,
            connection_timeout=CONNECT_S_MAX,
            network_timeout=None,  # the whole request has a deadline, its silences have none
        )

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        is_finished = False
        response: HTTPSocketResponse | None = None
        deadline = gevent.Timeout.start_new(timeout_s)
        try:
            response = self._client.post(self._path, json_body(request), HEADERS)
            for data in events(response):
                event = parse_json(decoded(data), self._now_s())
                is_finished = is_finished or bool(event.finish_reason)
                yield event
        except gevent.Timeout as over:
            if over is not deadline:
                raise
            raise ServerError("timeout", f"{self._url}: no complete answer in time") from None
        except (OSError, HTTPParseError) as error:
            raise ServerError("unreachable", f"{self._url}: {error}") from None
        finally:
            deadline.close()
            if response is not None:
                response.release()
        if not is_finished:
            raise ServerError("incomplete", "the stream ended without a finish reason")

    def close(self) -> None:
        self._client.close()


def events(response: HTTPSocketResponse) -> Iterator[bytes]:
    """The data of each event; a body that is not made of events is one."""
    while line := response.readline(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:]
        elif line.strip():
            yield line
    if rest := response.read():
        yield rest


def decoded(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise server_error(data.decode(errors="replace").strip()[:500])
    return found
