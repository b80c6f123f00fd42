"""The connections that users send through: gRPC or HTTP, both under gevent.

gRPC: as in client/triton_client.py, but calls wait with gevent instead of asyncio.

HTTP: Triton's interface or OpenAI's (client/http_interfaces.py), as in client/sse_client.py, but
with geventhttpclient, on which tritonclient's HTTP client and Locust's fast one are built.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from loadtest.users import gevent_setup  # noqa: F401  isort: skip  before grpc

import gevent
import grpc
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketResponse
from tritonclient.grpc import service_pb2_grpc

from loadtest.client.http_interfaces import (
    CHAT,
    COMPLETIONS,
    EVENT_STREAM,
    INCOMPLETE,
    HttpInterface,
    OpenAiInterface,
    TritonInterface,
    data_of,
)
from loadtest.client.openai_server import HttpAddress, http_address
from loadtest.client.protocol import CHANNELS, GenerateRequest, ServerError, TokenEvent
from loadtest.client.triton_client import (
    channel_options,
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
CONNECTIONS_MAX = 4_096  # over HTTP, so that no user waits for another user's connection
CONNECT_S_MAX = 10.0
PATHS = {"openai": COMPLETIONS, "openai-chat": CHAT}


def make_sender(
    settings: LoadSettings, model: str, now_s: Callable[[], float]
) -> GrpcSender | HttpSender:
    """A sender to one model of the server; shared by all users of a process."""
    if settings.gateway is not None:
        keys = {tenant.name: tenant.key for tenant in settings.tenants if tenant.key}
        interface = OpenAiInterface(PATHS[settings.via], model, settings.key, keys)
        return HttpSender(settings.gateway, interface, now_s)
    if settings.via == "grpc":
        return GrpcSender(settings.addresses.grpc, model, now_s)
    return HttpSender(http_address(settings.addresses.http), TritonInterface(model), now_s)


class GrpcSender:
    def __init__(self, url: str, model: str, now_s: Callable[[], float]) -> None:
        self._url = url
        self._model = model
        self._now_s = now_s
        options = channel_options(url)
        self._channels = [grpc.insecure_channel(url, options) for _ in range(CHANNELS)]
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
    """One POST for each request, answered by server-sent events: Triton's interface or OpenAI's."""

    def __init__(
        self, address: HttpAddress, interface: HttpInterface, now_s: Callable[[], float]
    ) -> None:
        self._url = address.url
        self._interface = interface
        self._now_s = now_s
        self._client = HTTPClient(
            address.host,
            address.port,
            concurrency=CONNECTIONS_MAX,
            connection_timeout=CONNECT_S_MAX,
            network_timeout=None,  # the whole request has a deadline, single reads have none
            ssl=address.is_tls,
        )

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        posted, answer = self._interface.posted(request), self._interface.reader()
        response: HTTPSocketResponse | None = None
        deadline = gevent.Timeout.start_new(timeout_s)
        try:
            response = self._client.post(posted.path, posted.body, posted.headers)
            if response.status_code != 200 or not is_stream(response):
                raise self._interface.refusal(
                    response.status_code, header(response, "retry-after"), bytes(response.read())
                )
            while line := response.readline(b"\n"):
                data = data_of(bytes(line))
                if data and (event := answer.read(data, self._now_s())) is not None:
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
        if not answer.is_finished:
            raise ServerError("incomplete", INCOMPLETE)

    def close(self) -> None:
        self._client.close()


def header(response: HTTPSocketResponse, name: str) -> str:
    found = response.get(name) or ""
    return found if isinstance(found, str) else found[0]


def is_stream(response: HTTPSocketResponse) -> bool:
    return EVENT_STREAM in header(response, "content-type")
