"""Sends an answer from the conductor to the client, streamed or whole.

A token costs one read, one event and one write, because the Starlette response writes to the
connection itself. Nothing is sent before the first piece, so an error before it has its own HTTP
status. After the first piece, an error is one more event and ends the answer. When the client's
connection closes, the call to the conductor is cancelled at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from backends.gateway.answer.pieces import AnswerPiece
from backends.gateway.answer.refusals import refusal_response
from backends.gateway.answering import StartedAnswer
from backends.gateway.gateway_counts import GatewayCounts
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


class AnswerEvents(Protocol):
    """The bytes of an answer in the form of one route."""

    @property
    def is_over(self) -> bool:
        """Whether the last event was made."""
        ...

    def event(self, piece: AnswerPiece) -> bytes:
        """The events of one piece; b"" if its text is held back."""
        ...

    def whole(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def error(self, refusal: HttpRefusal) -> bytes:
        """The event that ends a stream which has begun."""
        ...


class GenerationResponse(Response):
    """The HTTP response of one answer. It always cancels its `call` at the end."""

    _watching: asyncio.Future[None]  # ends when the client disconnects

    def __init__(
        self,
        answer_id: str,
        started: StartedAnswer,
        events: AnswerEvents,
        counts: GatewayCounts,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`keep` is called before the end of a complete answer is sent."""
        super().__init__(status_code=200)
        self._keep = keep
        self._id, self._events, self._counts = answer_id, events, counts
        self._call, self._request = started.call, started.request
        self._unfinished = len(started.choices)
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
            log.exception("answer %s", self._id, extra=of_request)
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
        events = self._events
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
                await self._kept()
            await send(
                {"type": "http.response.body", "body": body, "more_body": not events.is_over}
            )

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[AnswerPiece] = []
        unfinished = self._unfinished
        async for piece in self._call:
            pieces.append(piece)
            unfinished -= bool(piece.finish_reason)
            if not unfinished:  # send the answer before the conductor closes the call
                self._watching.cancel()
                self._counts.messages += 1
                body = self._events.whole(pieces)
                await self._kept()
                self._is_begun = True
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _kept(self) -> None:
        if self._keep is not None:
            await self._keep()

    async def _refuse(
        self, refusal: HttpRefusal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._counts.refused(refusal)
        if not self._is_begun:
            await refusal_response(refusal)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": self._events.error(refusal)})
