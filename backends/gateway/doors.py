"""What every request passes before its route, whatever it asks for.

A request id in and out (`X-Request-Id`), an API key where keys are configured, a limit on the body,
the end of new work while the process drains, and the counts. ASGI without more: a token passes here
as well, so this costs one call.

Not here: routes (app.py), draining itself (server.py).
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.gateway.events import refusal_response
from backends.gateway.gateway_counts import GatewayCounts
from backends.statuses import HttpRefusal, unavailable
from backends.tenants import ApiKeys
from mooncake_store.keys.curve import is_loopback
from mooncake_store.wire.addresses import is_number

BODY_BYTES_MAX = 16 * 2**20  # the conductor takes 4 MiB of text; token ids are longer as JSON
BODIES_MAX = 16  # so many of the longest may be in hand at once, before their answers begin
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
REQUEST_ID_HEADER = b"x-request-id"
# Asked by load balancers and probes, which have no key, and while the process drains; by browsers
# for the page, which asks its reader for one.
OPEN_PATHS = {"/", "/health", "/ready"}
OTHER_PATH = "other"
# A proxy before us might believe the other one: whose request it is, and where it ends.
SAID_ONCE = (b"authorization", b"content-length", b"transfer-encoding", b"host")
AMBIGUOUS = (
    "the request says twice who asks or how long it is; send one Authorization, and either "
    "Content-Length or Transfer-Encoding"
)
# Without keys any page that somebody looks at could ask whatever runs on their machine.
FOREIGN_PAGES = (b"cross-site", b"same-site")
FOREIGN_PAGE = "this comes from a page of another site; with API keys it may, if it knows one"
# Nor may such a page reach us under a name of its own that it has pointed at this machine.
FOREIGN_NAME = (
    "{host} may be anybody's name for this machine; without API keys ask localhost or an address, "
    "or give the server keys (--api-keys). A proxy before it can send `Host: localhost`"
)
CLOSE = {"Connection": "close"}
NO_KEY = "this server wants an API key that it knows, as `Authorization: Bearer KEY`"


@dataclass(slots=True)
class _Body:
    """Of one request, so far."""

    seen_bytes: int = 0
    held_bytes: int = 0  # counted among those of all


class Doors:
    """ASGI middleware. `is_draining` is set by the server."""

    def __init__(
        self,
        app: ASGIApp,
        counts: GatewayCounts,
        paths: frozenset[str],
        keys: ApiKeys | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        """`paths`: those that are counted by name. `keys`: None asks nobody for one."""
        self._keys = keys
        self._app, self._counts, self._paths = app, counts, paths
        self._body_bytes_max = body_bytes_max
        self._bodies_bytes = 0  # of requests whose answer has not begun
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["method"] == "HEAD":  # as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        request_id = headers.get(REQUEST_ID_HEADER, b"")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope["request_id"] = request_id.decode()
        path = scope["path"] if scope["path"] in self._paths else OTHER_PATH
        counts, started = self._counts, False
        body = _Body()

        async def send_and_count(message: Message) -> None:
            nonlocal started
            if not started and message["type"] == "http.response.start":
                started = True
                self._let_go(body)
                counts.answered(path, message["status"])
                more = [*message.get("headers", ()), (REQUEST_ID_HEADER, request_id)]
                message = {**message, "headers": more}
            await send(message)

        counts.in_flight += 1
        try:
            if (refusal := self._refusal(scope, headers)) is not None:
                counts.refused(refusal.code)
                ends = CLOSE if refusal.status == 400 else None
                await refusal_response(refusal, ends)(scope, receive, send_and_count)
                return
            await self._app(scope, self._limited(receive, body), send_and_count)
        finally:
            self._let_go(body)
            counts.in_flight -= 1

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> HttpRefusal | None:
        scope["tenant"] = None
        if len(headers) != len(scope["headers"]):
            given = [name for name, _ in scope["headers"]]
            if any(given.count(name) > 1 for name in SAID_ONCE):
                return HttpRefusal(400, "invalid_request", AMBIGUOUS)
        if b"transfer-encoding" in headers and b"content-length" in headers:
            return HttpRefusal(400, "invalid_request", AMBIGUOUS)
        if scope["path"] in OPEN_PATHS:
            return None
        if self._keys is None:
            if said := foreign_page(scope, headers):
                return HttpRefusal(403, "forbidden", said)
        else:
            scope["tenant"] = self._keys.tenant_of(bearer(headers.get(b"authorization", b"")))
            if scope["tenant"] is None:
                return HttpRefusal(401, "invalid_api_key", NO_KEY)
        if self.is_draining:
            return unavailable("this gateway is draining: ask another one")
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            return HttpRefusal(
                415,
                "unsupported_encoding",
                f"the body has Content-Encoding {coding[:32].decode('latin-1')}; send it as it is, "
                "without Content-Encoding",
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._body_bytes_max:
            return self._too_large()
        return None

    def _limited(self, receive: Receive, body: _Body) -> Receive:
        """A body that does not say its length is counted as it comes, and so are all together."""

        async def receive_and_count() -> Message:
            message = await receive()
            size_bytes = len(message.get("body", b""))
            body.seen_bytes += size_bytes
            body.held_bytes += size_bytes
            self._bodies_bytes += size_bytes
            if body.seen_bytes > self._body_bytes_max:
                raise self._too_large()
            if size_bytes and self._bodies_bytes > BODIES_MAX * self._body_bytes_max:
                raise unavailable("this gateway has too many long requests in hand; ask again")
            return message

        return receive_and_count

    def _let_go(self, body: _Body) -> None:
        self._bodies_bytes -= body.held_bytes
        body.held_bytes = 0

    def _too_large(self) -> HttpRefusal:
        what = f"the body has more than {self._body_bytes_max:,} bytes; send a shorter prompt"
        return HttpRefusal(413, "too_large_body", what)


def bearer(header: bytes) -> str:
    """The key in an Authorization header; "" without one."""
    scheme, _, key = header.decode("latin-1").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def foreign_page(scope: Scope, headers: dict[bytes, bytes]) -> str:
    """What shows that a web page of somebody else asks; "" where nothing does."""
    if headers.get(b"sec-fetch-site") in FOREIGN_PAGES:
        return FOREIGN_PAGE
    address, port = scope.get("server") or ("", None)
    host = headers.get(b"host", b"").decode("latin-1")
    if is_loopback(f"{address}:{port}") and is_anybodys(host):
        return FOREIGN_NAME.format(host=host)
    return ""


def is_anybodys(host: str) -> bool:
    """Is the value of a Host header a name whose owner may point it where they like? Addresses
    and `localhost` are not, nor is a name without a dot, which no public DNS has."""
    name = re.sub(r":\d*$", "", host).rstrip(".").lower()
    return "." in name and not name.endswith(".localhost") and not is_number(name.strip("[]"))
