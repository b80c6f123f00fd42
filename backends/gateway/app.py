"""The routes of OpenAI's interface, and the routes for operators and load balancers.

POST /v1/chat/completions, /v1/completions      an answer, streamed or whole
POST /v1/messages, /v1/messages/count_tokens    an answer in Anthropic's form; its prompt's tokens
POST /v1/responses, and its stored responses    responses_routes.py
GET  /v1/models, /v1/models/NAME                the served model
POST /tokenize, /detokenize                     ids of a prompt's tokens; the text of token ids
GET  /health, /ping, /ready, /metrics           liveness, readiness, Prometheus metrics
GET  /version, /load                            this software's version; requests in flight
GET  /, /status                                 the status page, and its contents as JSON
GET  /openapi.json                              the description of these routes
POST each of UNSUPPORTED_PATHS                  status 400 with a recommendation
"""

from __future__ import annotations

import asyncio
import http.client
import importlib.metadata
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from backends.gateway.answer.chat_events import OBJECTS, AnswerFacts, EventStream
from backends.gateway.answer.refusals import refusal_response
from backends.gateway.answering import StartedAnswer, start_answer
from backends.gateway.bodies import as_json, read_body
from backends.gateway.doors import BODY_BYTES_MAX, Doors, answers_browsers
from backends.gateway.frontend_calls import FrontendCalls, ServedModel
from backends.gateway.gateway_counts import GatewayCounts
from backends.gateway.generation import GenerationResponse
from backends.gateway.messages.events import MessageEvents
from backends.gateway.messages.request import as_tokenize, read_messages_request
from backends.gateway.page.html import page
from backends.gateway.page.live_status import LiveStatus, shown_to
from backends.gateway.request import fields
from backends.gateway.request.fields import CHAT, COMPLETION, MESSAGES
from backends.gateway.request.infer_request import GatewayRequest, read_request
from backends.gateway.request.prompts import read_detokenize, read_tokenize
from backends.gateway.request.schemas import DETOKENIZE_SCHEMA, TOKENIZE_SCHEMA
from backends.gateway.responses.stored import IN_MEMORY
from backends.gateway.responses_routes import ResponsesRoutes
from backends.gateway.tokenizing import Tokenizing
from backends.metrics.status.readings import fetch_page
from backends.statuses import HttpRefusal, unavailable
from backends.tenants import GATEWAY, ApiKeys, ApiTenant, tenant_parameters
from backends.tenants.tenant_labels import without_other_tenants
from backends.tensors import CHARGE, CLUSTER
from backends.tracing.export import Tracing
from backends.tracing.gateway_traces import GatewayTraces, traceparent_in
from backends.tracing.trace_context import TRACEPARENT

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
PATHS = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions"}
# Path of OpenAI's interface that is not supported -> end of the error message.
UNSUPPORTED_PATHS = {
    "/v1/embeddings": "it serves models that generate text",
    "/v1/images/generations": "it serves models that generate text",
    "/v1/images/edits": "it serves models that generate text",
    "/v1/images/variations": "it serves models that generate text",
}
LEFT = 499  # status for a client that disconnected; nginx's, not in the HTTP standard
# Field of /v1/models that load generators read -> name of the value in the conductor's description.
FACTS = {
    "max_model_len": "context_tokens_max",
    "block_tokens": "block_tokens",
    "vocabulary_tokens": "vocabulary_tokens",
}
NO_CONTENT_YET = "the frontend has not answered yet; retry later"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    frontend: str  # HOST:PORT of the frontend's gRPC endpoint
    metrics: str = ""  # HOST:PORT of the launcher's metrics page; "": no launcher
    name: str = "gateway-0"  # name of this process in metrics and traces
    body_bytes_max: int = BODY_BYTES_MAX
    allowed_origins: frozenset[str] = frozenset()  # of web pages whose scripts may call it
    stored_responses: str = IN_MEMORY  # path of the file of the responses that clients store

    @property
    def metrics_url(self) -> str:
        return f"http://{self.metrics}/metrics" if self.metrics else ""


class Gateway:
    """The routes and their shared state. `app` is the ASGI application of the server."""

    calls: FrontendCalls  # set when the server starts, before the first request

    def __init__(
        self, options: GatewaySettings, keys: ApiKeys | None = None, tracing: Tracing | None = None
    ) -> None:
        self.options = options
        self.counts = GatewayCounts(options.name)
        self._tokenizing = Tokenizing()
        self._has_keys = keys is not None
        self.own_readers: set[object] = set()  # open connections to this process's metrics page
        self.responses = ResponsesRoutes(self._started, self.counts, options.stored_responses)
        self._live = LiveStatus(options.metrics_url, self._cluster)
        self._started_s = int(time.time())
        routes = self._routes()
        paths = frozenset(route.path for route in routes.routes if "{" not in route.path)
        origins = options.allowed_origins
        self.doors = Doors(routes, self.counts, paths, keys, options.body_bytes_max, origins)
        self._tracing = tracing
        self.app: ASGIApp = self.doors
        if origins:
            self.app = answers_browsers(self.doors, origins)
        if tracing is not None:
            self.app = GatewayTraces(self.app, tracing, options.name, paths)
            self.counts.spans = tracing.export

    def _routes(self) -> FastAPI:
        app = FastAPI(
            title="mooncake-triton",
            docs_url=None,
            redoc_url=None,
            lifespan=self._lifespan,
            redirect_slashes=False,
        )
        posts = [(PATHS[name], self._generate(name), fields.schema(name), name) for name in PATHS]
        posts.append((MESSAGES_PATH, self.message, fields.schema(MESSAGES), MESSAGES))
        posts.append((COUNT_PATH, self.count, fields.schema(MESSAGES), "count_tokens"))
        posts.append(("/tokenize", self.tokenize, TOKENIZE_SCHEMA, "tokenize"))
        posts.append(("/detokenize", self.detokenize, DETOKENIZE_SCHEMA, "detokenize"))
        for path, answer, schema, name in posts:
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            app.add_api_route(
                path,
                answer,
                methods=["POST"],
                response_class=Response,
                openapi_extra={"requestBody": body},
                name=name,
            )
        for path, answer in (
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
            ("/health", self.health),
            ("/ping", self.health),
            ("/version", self.version),
            ("/load", self.load),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/", self.page),
            ("/status", self.status),
        ):
            app.add_api_route(path, answer, methods=["GET"], response_class=Response)
        self.responses.add_to(app)
        for path in UNSUPPORTED_PATHS:
            app.add_route(path, self.unsupported, methods=["POST"], include_in_schema=False)
        app.add_exception_handler(HttpRefusal, self._refused)
        app.add_exception_handler(ClientDisconnect, self._left)
        app.add_exception_handler(HTTPException, self._no_route)
        app.add_exception_handler(Exception, self._defect)
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.calls = FrontendCalls(self.options.frontend)
        watch = asyncio.ensure_future(self.calls.watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await self.calls.close()
            self.responses.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    def _generate(self, route: str) -> Any:
        async def generate(request: Request) -> Response:
            wanted = await read_body(
                request, lambda body: read_request(route, body, secrets.randbits(63))
            )
            answer_id = f"{OBJECTS[route][2]}{uuid.uuid4().hex}"
            started, served = await self._started(request, wanted, answer_id)
            wanted = started.request
            facts = AnswerFacts(
                route,
                answer_id,
                int(time.time()),
                served.name,
                wanted.counts_each_event,
                wanted.answers,
            )
            events = EventStream(facts, wanted.includes_usage, started.choices, wanted.kept)
            return GenerationResponse(answer_id, started, events, self.counts)

        generate.__name__ = f"generate_{route}"
        return generate

    async def message(self, request: Request) -> Response:
        wanted = await read_body(
            request, lambda body: read_messages_request(body, secrets.randbits(63))
        )
        message_id = f"msg_{uuid.uuid4().hex}"
        started, served = await self._started(request, wanted, message_id)
        words = wanted.inputs.get("stop_words", ())
        events = MessageEvents(message_id, served.name, started.choices[0], words)
        return GenerationResponse(message_id, started, events, self.counts)

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that a request to /v1/messages is."""
        wanted = await read_body(request, lambda body: read_messages_request(body, 0, counts=True))
        served = await self._served(wanted.model)
        await self._charge(request)
        asked = as_tokenize(wanted)
        token_ids = await asyncio.to_thread(self._tokenizing.token_ids, served.checkpoint, asked)
        return as_json({"input_tokens": len(token_ids)})

    async def _started(
        self, request: Request, wanted: GatewayRequest, answer_id: str
    ) -> tuple[StartedAnswer, ServedModel]:
        """Start the answer for the tenant of the HTTP request. Raises HttpRefusal."""
        served = await self._served(wanted.model)
        wanted = of_tenant(wanted, request.scope["tenant"])
        if traceparent := traceparent_in(request.scope):
            parameters = {**wanted.parameters, TRACEPARENT: traceparent}
            wanted = replace(wanted, parameters=parameters)
        started = await start_answer(wanted, answer_id, served, self.calls, self._tokenizing)
        return started, served

    async def _served(self, name: str) -> ServedModel:
        """The served model, if it has this name or `name` is "". Probes the frontend if no probe
        has succeeded yet. Raises HttpRefusal 503 without a frontend, and 404 for another name."""
        if self.calls.served is None:
            await self.calls.probe(waits=True)
        if (served := self.calls.served) is None:
            raise unavailable(NO_CONTENT_YET)
        if name not in ("", served.name):
            what = f"there is no model {fields.shown(name)}; served: {served.name}"
            raise HttpRefusal(404, "model_not_found", what, "model")
        return served

    async def tokenize(self, request: Request) -> Response:
        wanted = await read_body(request, read_tokenize)
        served = await self._served(wanted.model)
        await self._charge(request)
        token_ids = await asyncio.to_thread(self._tokenizing.token_ids, served.checkpoint, wanted)
        return as_json({"count": len(token_ids), "tokens": token_ids})

    async def detokenize(self, request: Request) -> Response:
        model, token_ids = await read_body(request, read_detokenize)
        served = await self._served(model)
        await self._charge(request)
        text = await asyncio.to_thread(self._tokenizing.text, served.checkpoint, token_ids)
        return as_json({"prompt": text})

    async def _charge(self, request: Request) -> None:
        """Count the call against the rates of the key's tenant. Raises HttpRefusal above them."""
        tenant = request.scope["tenant"]
        if tenant is not None and tenant.has_rates:
            await self.calls.describe(CHARGE, tenant_parameters(tenant.name))

    async def models(self) -> Response:
        return as_json({"object": "list", "data": [await self._facts("")]})

    async def model(self, name: str) -> Response:
        return as_json(await self._facts(name))

    async def _facts(self, name: str) -> dict[str, object]:
        """The served model in OpenAI's format, with the FACTS that the conductor describes."""
        served = await self._served(name)
        facts = await self.calls.describe_model()
        found: dict[str, object] = {
            "id": served.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "mooncake-triton",
        }
        for field, known in FACTS.items():
            if known in facts:
                found[field] = facts[known]
        return found

    async def health(self) -> Response:
        return as_json({"status": "alive"})

    async def version(self) -> Response:
        return as_json({"version": importlib.metadata.version("mooncake-triton")})

    async def load(self) -> Response:
        """The requests of this process that have not ended, without this one."""
        return as_json({"server_load": self.counts.in_flight - 1})

    async def ready(self) -> Response:
        """Status 200 if the latest probe of the frontend succeeded and this process does not drain;
        otherwise 503."""
        if self.doors.is_draining:
            return as_json({"status": "draining"}, 503)
        is_ready = self.calls.is_ready
        return as_json({"status": "ready" if is_ready else "waiting"}, 200 if is_ready else 503)

    async def page(self) -> Response:
        """The status page without data. Its script reads /status, which may need an API key."""
        return page()

    async def status(self, request: Request) -> Response:
        shown = shown_to(await self._live.now(), request.scope["tenant"])
        served = self.calls.served
        return as_json({"model": served.name if served else "", **shown})

    async def _cluster(self) -> bytes:
        parameters = tenant_parameters(GATEWAY) if self._has_keys else {}
        return await self.calls.describe(CLUSTER, parameters)

    async def metrics(self, request: Request) -> Response:
        """The metrics page of the launcher, or of this process without a launcher. With API keys,
        series of other tenants are removed. HttpRefusal 503: the launcher does not answer."""
        if not self.options.metrics:
            return Response(self.counts.page(), media_type="text/plain; version=0.0.4")
        try:
            shown = await asyncio.to_thread(fetch_page, self.options.metrics_url)
        except (OSError, http.client.HTTPException) as error:
            raise unavailable(f"the metrics page does not answer: {error}") from None
        if (tenant := request.scope["tenant"]) is not None:
            shown = without_other_tenants(shown, tenant.name)
        return Response(shown, media_type="text/plain; version=0.0.4")

    async def unsupported(self, request: Request) -> Response:
        path = request.url.path
        what = f"{path} is not supported by this server; {UNSUPPORTED_PATHS[path]}"
        raise HttpRefusal(400, "unsupported", what, path)

    async def _refused(
        self, request: Request, refusal: Exception, more: Mapping[str, str] | None = None
    ) -> Response:
        """Count the refusal and make its response. `more`: further headers."""
        assert isinstance(refusal, HttpRefusal)
        self.counts.refused(refusal)
        return refusal_response(refusal, more)

    async def _left(self, request: Request, _: Exception) -> Response:
        """The client disconnected before the body arrived, so it does not receive this response."""
        self.counts.left += 1
        return Response(status_code=LEFT)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            what = f"{request.url.path} does not take {request.method}"
            refusal = HttpRefusal(405, "method_not_allowed", what)
            return await self._refused(request, refusal, error.headers)  # with the header Allow
        what = f"there is no route {fields.shown(request.url.path)}"
        return await self._refused(request, HttpRefusal(404, "path_not_found", what))

    async def _defect(self, request: Request, error: Exception) -> Response:
        """The answer after an unexpected exception. uvicorn logs the traceback."""
        what = f"{type(error).__name__}: {error}"
        return await self._refused(request, HttpRefusal(500, "internal_error", what))


def of_tenant(request: GatewayRequest, tenant: ApiTenant | None) -> GatewayRequest:
    """The request with its API key's tenant, and with a proof of the tenant for the frontend. If
    `tenant` is None (no API keys), the request is unchanged. Raises HttpRefusal 403 if the request
    names another tenant."""
    if tenant is None:
        return request
    named = request.parameters.get("tenant", tenant.name)
    if named != tenant.name:
        what = f"this key is of tenant {tenant.name}, not of {fields.shown(named)}"
        raise HttpRefusal(403, "forbidden", what, "tenant")
    parameters = {**request.parameters, **tenant_parameters(tenant.name)}
    return replace(request, parameters=parameters)
