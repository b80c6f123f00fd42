"""Sends an answer from the conductor to the client, streamed or whole.

A token costs one read, one event and one write, because the Starlette response writes to the
connection itself. Nothing is sent before the first piece, so an error before it has its own HTTP
status. After the first piece, an error is one more event and ends the answer. When the client's
connection closes, the call to the conductor is cancelled at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from backends.gateway.events import (
    AnswerFacts,
    AnswerPiece,
    ChoiceWriter,
    EventStream,
    error_event,
    refusal_response,
    whole,
)
from backends.gateway.frontend_calls import FrontendCall, SeveralCalls
from backends.gateway.gateway_counts import GatewayCounts
from backends.gateway.infer_request import GatewayRequest
from backends.statuses import HttpRefusal

log = logging.getLogger(__name__)
GRACE_S = 2.0  # seconds after a timeout for which the gateway lets the conductor report it
EVENT_STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ],
}


class GenerationResponse(Response):
    """The HTTP response of one answer. It always cancels its `call` at the end."""

    _watching: asyncio.Future[None]  # ends when the client disconnects

    def __init__(
        self,
        call: FrontendCall | SeveralCalls,
        facts: AnswerFacts,
        request: GatewayRequest,
        counts: GatewayCounts,
        choices: Sequence[ChoiceWriter],
    ) -> None:
        super().__init__(status_code=200)
        self._call, self._facts, self._counts = call, facts, counts
        self._request, self._choices = request, choices
        self._is_late = False
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._watching = asyncio.ensure_future(self._watch(receive))
        late = None
        if self._request.timeout_s:
            loop = asyncio.get_running_loop()
            late = loop.call_later(self._request.timeout_s + GRACE_S, self._end_late)
        try:
            await (
                self._stream(send) if self._request.is_stream else self._whole(scope, receive, send)
            )
        except asyncio.CancelledError:
            if not self._call.is_left:
                raise
            if self._is_late:
                what = f"its timeout of {self._request.timeout_s:g} s has passed"
                await self._refuse(HttpRefusal(504, "deadline", what), scope, receive, send)
            else:
                self._counts.left += 1
        except HttpRefusal as refusal:
            await self._refuse(refusal, scope, receive, send)
        except Exception as error:  # Catch all: a defect is logged and reported to the client
            of_request = {"request_id": scope.get("request_id", "")}
            log.exception("answer %s", self._facts.answer_id, extra=of_request)
            refusal = HttpRefusal(500, "internal_error", f"{type(error).__name__}: {error}")
            await self._refuse(refusal, scope, receive, send)
        finally:
            self._watching.cancel()
            if late is not None:
                late.cancel()
            self._call.leave()

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client disconnects, then cancel the call."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.leave()

    def _end_late(self) -> None:
        self._is_late = True
        self._call.leave()

    async def _stream(self, send: Send) -> None:
        events = EventStream(self._facts, self._request.includes_usage, self._choices)
        async for piece in self._call:
            body = events.event(piece)
            if not body:  # text that may begin a call is held back
                continue
            if not self._is_begun:
                self._is_begun = True
                await send(EVENT_STREAM)
            self._counts.messages += 1
            if events.is_over:  # because uvicorn reports a response's end as a disconnect
                self._watching.cancel()
            await send(
                {"type": "http.response.body", "body": body, "more_body": not events.is_over}
            )

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[AnswerPiece] = []
        unfinished = len(self._choices)
        async for piece in self._call:
            pieces.append(piece)
            unfinished -= bool(piece.finish_reason)
            if not unfinished:  # send the answer before the conductor closes the call
                self._watching.cancel()
                self._counts.messages += 1
                body = whole(self._facts, pieces, self._choices, self._request.kept)
                self._is_begun = True
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _refuse(
        self, refusal: HttpRefusal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._counts.refused(refusal)
        if not self._is_begun:
            await refusal_response(refusal)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": error_event(refusal)})
