"""The status page and playground: one file, and the headers that keep it to itself.

It loads nothing from anywhere, and its policy lets a browser run its one script, use its one style
and ask this gateway, and nothing else: what a prompt or an answer says is text, whatever it says.
Not here: what it shows (live_status.py).
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).with_name("page.html")
PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def content() -> bytes:
    return PAGE.read_bytes()


@cache
def headers() -> dict[str, str]:
    """The policy names script and style by their hashes, so that no other one is ever used."""
    hashes = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in PARTS.findall(content().decode())
    }
    policy = (
        "default-src 'none'",
        f"script-src 'sha256-{hashes['script']}'",
        f"style-src 'sha256-{hashes['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def page() -> Response:
    return Response(content(), 200, headers(), "text/html; charset=utf-8")
