"""Checks and counts of every request before its route.

This middleware reads or makes the request id (`X-Request-Id`), and checks the API key if keys are
configured. It limits bodies, rejects new requests while the process drains, and counts requests.
It is plain ASGI, so it adds only one call to each message of an answer.

Scripts of web pages may call the gateway if the pages' origins are allowed (CORS). A browser then
asks first (a preflight), without the API key, and lets the script call if the answer names the
origin.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.gateway.answer.refusals import refusal_response
from backends.gateway.gateway_counts import GatewayCounts
from backends.statuses import HttpRefusal, unavailable
from backends.tenants import ApiKeys
from mooncake_store.keys.curve import is_loopback
from mooncake_store.wire.addresses import is_number

# The conductor's limit is 4 MiB of text, but a prompt of token ids has more bytes as JSON.
BODY_BYTES_MAX = 16 * 2**20
BODIES_MAX = 16  # limit of all bodies whose answers have not begun, in units of body_bytes_max
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
REQUEST_ID_HEADER = b"x-request-id"
# Paths that need no API key and are served during a drain. Load balancers and probes have no key.
# The status page at / has a field for the key.
OPEN_PATHS = {"/", "/health", "/ping", "/ready"}
OTHER_PATH = "other"
# A request that repeats one of these headers is rejected. A proxy in front of the gateway might
# use the first header and the gateway the second, and so see another key or another body.
ANTHROPIC_KEY = b"x-api-key"  # Anthropic's clients send the key in this header
SINGLE_HEADERS = (b"authorization", ANTHROPIC_KEY, b"content-length", b"transfer-encoding", b"host")
AMBIGUOUS = (
    "the request has two values for its key, its host or its length; send one Authorization, one "
    "Host, and either Content-Length or Transfer-Encoding"
)
# Values of Sec-Fetch-Site that are rejected without API keys. Otherwise any web page in a user's
# browser could call the gateway on the user's machine.
FOREIGN_PAGES = (b"cross-site", b"same-site")
FOREIGN_PAGE = (
    "this request comes from a page of another site, which is refused without API keys; give the "
    "server keys (--api-keys), or allow the page's origin (--allowed-origins)"
)
# Protection from DNS rebinding, in which a web page's own DNS name points to this machine.
FOREIGN_NAME = (
    "{host} may be a foreign DNS name for this machine; without API keys call localhost or an "
    "address, or give the server keys (--api-keys). A proxy can send `Host: localhost`"
)
ANY_ORIGIN = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+", re.IGNORECASE)
# Browsers leave these ports out.
DEFAULT_PORT = re.compile(r"^(http://[^:]+(?=:80$)|https://[^:]+(?=:443$)).*$")
PREFLIGHT_S_MAX = 600  # for so many seconds a browser does not ask again
EXPOSED = ("X-Request-Id", "Retry-After")
CLOSE = {"Connection": "close"}
NO_KEY = "this server needs a valid API key, as `Authorization: Bearer KEY`"


@dataclass(slots=True)
class _Body:
    """The body of one request."""

    seen_bytes: int = 0  # bytes received so far
    held_bytes: int = 0  # bytes counted in Doors._bodies_bytes; 0 after the answer has begun


class Doors:
    """ASGI middleware. DrainingServer (server.py) sets `is_draining`."""

    def __init__(
        self,
        app: ASGIApp,
        counts: GatewayCounts,
        paths: frozenset[str],
        keys: ApiKeys | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
        allowed_origins: frozenset[str] = frozenset(),
    ) -> None:
        """`paths`: paths that are counted separately; all other paths share one count."""
        self._keys, self._allowed_origins = keys, allowed_origins
        self._app, self._counts, self._paths = app, counts, paths
        self._body_bytes_max = body_bytes_max
        self._bodies_bytes = 0  # bytes of all bodies whose answers have not begun
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path = scope["path"]
        if len(path) > 1 and path.endswith("/") and path.rstrip("/") in self._paths:
            scope = {**scope, "path": path.rstrip("/")}
        if scope["method"] == "HEAD":  # handled as GET; the server omits the body
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
                self._release(body)
                counts.requests[path, message["status"]] += 1
                more = [*message.get("headers", ()), (REQUEST_ID_HEADER, request_id)]
                message = {**message, "headers": more}
            await send(message)

        counts.in_flight += 1
        try:
            if (refusal := self._refusal(scope, headers)) is not None:
                counts.refused(refusal)
                ends = CLOSE if refusal.status == 400 else None
                await refusal_response(refusal, ends)(scope, receive, send_and_count)
                return
            await self._app(scope, self._limited(receive, body), send_and_count)
        finally:
            self._release(body)
            counts.in_flight -= 1

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> HttpRefusal | None:
        scope["tenant"] = None
        if len(headers) != len(scope["headers"]):
            given = [name for name, _ in scope["headers"]]
            if any(given.count(name) > 1 for name in SINGLE_HEADERS):
                return HttpRefusal(400, "invalid_request", AMBIGUOUS)
        if b"transfer-encoding" in headers and b"content-length" in headers:
            return HttpRefusal(400, "invalid_request", AMBIGUOUS)
        if scope["path"] in OPEN_PATHS:
            return None
        if self._keys is None:
            is_foreign = not is_allowed(headers.get(b"origin", b""), self._allowed_origins)
            if is_foreign and (reason := foreign_page(scope, headers)):
                return HttpRefusal(403, "forbidden", reason)
        else:
            given = bearer(headers.get(b"authorization", b""))
            own = headers.get(ANTHROPIC_KEY, b"").decode("latin-1")
            scope["tenant"] = self._keys.tenant_of(given or own)
            if scope["tenant"] is None:
                return HttpRefusal(401, "invalid_api_key", NO_KEY)
        if self.is_draining:
            return unavailable("this gateway is shutting down; send the request to another one")
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            return HttpRefusal(
                415,
                "unsupported_encoding",
                f"the body has Content-Encoding {coding[:32].decode('latin-1')}; send it without "
                "Content-Encoding",
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._body_bytes_max:
            return self._too_large()
        return None

    def _limited(self, receive: Receive, body: _Body) -> Receive:
        """`receive` with a limit on the bytes of this body and on the bytes of all held bodies."""

        async def receive_and_count() -> Message:
            message = await receive()
            size_bytes = len(message.get("body", b""))
            body.seen_bytes += size_bytes
            body.held_bytes += size_bytes
            self._bodies_bytes += size_bytes
            if body.seen_bytes > self._body_bytes_max:
                raise self._too_large()
            if size_bytes and self._bodies_bytes > BODIES_MAX * self._body_bytes_max:
                raise unavailable("this gateway is receiving too many long requests; retry later")
            return message

        return receive_and_count

    def _release(self, body: _Body) -> None:
        self._bodies_bytes -= body.held_bytes
        body.held_bytes = 0

    def _too_large(self) -> HttpRefusal:
        what = f"the body has more than {self._body_bytes_max:,} bytes; send a shorter prompt"
        return HttpRefusal(413, "too_large_body", what)


def bearer(header: bytes) -> str:
    """The key in an Authorization header; "" without a header or with another scheme."""
    scheme, _, key = header.decode("latin-1").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def foreign_page(scope: Scope, headers: dict[bytes, bytes]) -> str:
    """Why the request seems to come from a web page of another site; "" if it does not."""
    if headers.get(b"sec-fetch-site") in FOREIGN_PAGES:
        return FOREIGN_PAGE
    address, port = scope.get("server") or ("", None)
    host = headers.get(b"host", b"").decode("latin-1")
    if is_loopback(f"{address}:{port}") and is_public_name(host):
        return FOREIGN_NAME.format(host=host)
    return ""


def is_public_name(host: str) -> bool:
    """Whether the Host header may be a public DNS name, which may point to any address. False for
    addresses, for `localhost`, and for names without a dot, which are never public."""
    name = re.sub(r":\d*$", "", host).rstrip(".").lower()
    return "." in name and not name.endswith(".localhost") and not is_number(name.strip("[]"))


def read_origins(text: str) -> frozenset[str]:
    """The origins in a comma separated list. Raises ValueError for one with a path, for example."""
    found = [each.strip().rstrip("/") for each in text.split(",") if each.strip()]
    for each in found:
        if each != ANY_ORIGIN and ("*" in each or not ORIGIN.fullmatch(each)):
            raise ValueError(
                f"{each!r} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT"
            )
    return frozenset(DEFAULT_PORT.sub(r"\1", each.lower()) for each in found)


def is_allowed(origin: bytes, allowed: frozenset[str]) -> bool:
    """Whether a request with this header Origin comes from an allowed page."""
    return bool(origin) and (ANY_ORIGIN in allowed or origin.decode("latin-1").lower() in allowed)


def answers_browsers(app: ASGIApp, allowed: frozenset[str]) -> ASGIApp:
    """The application with answers to preflights, and with the headers of CORS."""
    return CORSMiddleware(
        app,
        allow_origins=sorted(allowed),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
        allow_private_network=True,
        max_age=PREFLIGHT_S_MAX,
    )
