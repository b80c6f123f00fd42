"""Asking a server over HTTP, and nobody else: what carries an API key is opened with this.

urllib by itself asks the proxy that `http_proxy` names, and follows a redirect to whichever host it
names, with the same headers.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an HTTPError."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def get(url: str, key: str, timeout_s: float) -> bytes:
    """`key`: an API key; "" for none. Raises OSError, ValueError for what is no address."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(url, headers=headers)
    with DIRECTLY.open(asked, timeout=timeout_s) as answer:
        return bytes(answer.read())
