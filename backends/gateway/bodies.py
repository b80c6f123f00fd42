"""Bodies of HTTP requests and responses as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from backends.statuses import HttpRefusal

LONG_BODY_BYTES = 256 * 1024  # a longer body is parsed in another thread

T = TypeVar("T")


async def read_body(request: Request, read: Callable[[object], T], waits: bool = False) -> T:
    """Receive the request's JSON body and return `read` of it. Raises HttpRefusal, or
    ClientDisconnect. A long body is parsed in another thread, so that no stream waits for it.
    `waits`: `read` reads files, so it always runs there."""
    body = b"".join([part async for part in request.stream()])
    try:
        if len(body) <= LONG_BODY_BYTES and not waits:
            return read(decoded(body))
        return await asyncio.to_thread(lambda: read(decoded(body)))
    except RecursionError:
        what = "the body is nested too deep; use fewer levels of objects and lists"
        raise HttpRefusal(400, "invalid_request", what) from None


def decoded(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HttpRefusal(400, "invalid_request", f"the body is not valid JSON: {error}") from None


def as_json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
