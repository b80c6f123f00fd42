"""The routes of OpenAI's Responses.

POST   /v1/responses                    a response, streamed or whole
GET    /v1/responses/ID                 a stored response
GET    /v1/responses/ID/input_items     the items before it
DELETE /v1/responses/ID                 forget it

A response is stored if the request has `store` true and the tenant has memory for it
(`stored_responses_bytes_max`). Without API keys all requests are of one tenant, which has
KEYLESS_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from backends.gateway.answering import StartedAnswer
from backends.gateway.bodies import as_json, read_body
from backends.gateway.frontend_calls import ServedModel
from backends.gateway.gateway_counts import GatewayCounts
from backends.gateway.generation import GenerationResponse
from backends.gateway.request import fields
from backends.gateway.request.infer_request import GatewayRequest
from backends.gateway.responses.events import ResponseEvents, new_response
from backends.gateway.responses.items import INPUT, RESPONSE, listed
from backends.gateway.responses.request import ResponsesRequest, read_responses
from backends.gateway.responses.stored import EarlierResponses, StoredResponses
from backends.statuses import HttpRefusal
from backends.tenants import ApiTenant

log = logging.getLogger(__name__)
PATH = "/v1/responses"
KEYLESS_BYTES_MAX = 64 * 2**20
PAGE_MAX = 100  # items of a page, as in OpenAI's interface
Start = Callable[
    [Request, GatewayRequest, str], Awaitable[tuple[StartedAnswer, ServedModel]]
]  # (HTTP request, checked request, response id)


class ResponsesRoutes:
    def __init__(self, start: Start, counts: GatewayCounts, path: str) -> None:
        """`path`: of the file of stored responses."""
        self._start, self._counts = start, counts
        self._stored = StoredResponses(path)

    def add_to(self, app: FastAPI) -> None:
        body = {"application/json": {"schema": fields.schema(fields.RESPONSES)}}
        app.add_api_route(
            PATH,
            self.create,
            methods=["POST"],
            response_class=Response,
            openapi_extra={"requestBody": {"required": True, "content": body}},
            name="responses",
        )
        of_one = f"{PATH}/{{response_id}}"
        for path, answer, method in (
            (of_one, self.stored, "GET"),
            (f"{of_one}/input_items", self.input_items, "GET"),
            (of_one, self.delete, "DELETE"),
        ):
            app.add_api_route(path, answer, methods=[method], response_class=Response)

    def close(self) -> None:
        self._stored.close()

    async def create(self, request: Request) -> Response:
        name = _name(request)
        earlier = EarlierResponses(self._stored, name)
        wanted = await read_body(
            request, lambda body: read_responses(body, secrets.randbits(63), earlier), waits=True
        )
        bytes_max = _stored_bytes_max(request) if wanted.is_stored else 0
        response_id = RESPONSE + uuid.uuid4().hex
        started, served = await self._start(request, wanted.chat, response_id)
        made = new_response(wanted, response_id, int(time.time()), served.name)
        events = ResponseEvents(made, started.choices[0])
        keep = partial(asyncio.to_thread, self._keep, name, bytes_max, events, wanted)
        kept = keep if wanted.is_stored else None
        return GenerationResponse(response_id, started, events, self._counts, kept)

    def _keep(
        self, tenant: str, bytes_max: int, events: ResponseEvents, wanted: ResponsesRequest
    ) -> None:
        try:
            self._stored.add(tenant, bytes_max, events.response, wanted.items)
        except sqlite3.Error:  # the answer is sent anyway
            log.exception("response %s cannot be stored", events.response["id"])

    async def stored(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false") != "false":
            what = "stored responses are not streamed; leave out stream"
            raise HttpRefusal(400, "unsupported", what, "stream")
        found = await asyncio.to_thread(self._stored.get, response_id, _name(request))
        return Response(bytes(found.response), media_type="application/json")

    async def input_items(self, request: Request, response_id: str) -> Response:
        """One page. Query: `order`, `limit`, and `after`, the id of the last item before it."""
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc") or not (limit.isascii() and limit.isdecimal()):
            raise HttpRefusal(400, "invalid_request", "send order asc or desc, and limit 1 to 100")
        found = await asyncio.to_thread(self._stored.get, response_id, _name(request))
        key = response_id.removeprefix(RESPONSE)
        items = [listed(each, f"{INPUT}_{key}_{index}") for index, each in enumerate(found.items)]
        if order == "desc":
            items.reverse()
        after = query.get("after")
        begin = next((at + 1 for at, each in enumerate(items) if each["id"] == after), 0)
        page = items[begin : begin + min(max(int(limit[:4]), 1), PAGE_MAX)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        has_more = begin + len(page) < len(items)
        return as_json({"object": "list", "data": page, "has_more": has_more, **ends})

    async def delete(self, request: Request, response_id: str) -> Response:
        await asyncio.to_thread(self._stored.delete, response_id, _name(request))
        return as_json({"id": response_id, "object": "response", "deleted": True})


def _stored_bytes_max(request: Request) -> int:
    """Raises HttpRefusal if the tenant's responses are not stored."""
    tenant: ApiTenant | None = request.scope["tenant"]
    if tenant is None:
        return KEYLESS_BYTES_MAX
    if not tenant.stored_responses_bytes_max:
        what = f"no responses of tenant {tenant.name} are stored; leave out store"
        raise HttpRefusal(403, "forbidden", what, "store")
    return tenant.stored_responses_bytes_max


def _name(request: Request) -> str:
    """The tenant of the request's key; "" without API keys."""
    tenant: ApiTenant | None = request.scope["tenant"]
    return tenant.name if tenant is not None else ""
