"""Asking a server over HTTP, and nobody else.

urllib by itself asks the proxy that `http_proxy` names, and follows a redirect to whichever host it
names, with the same headers. Servers that this one asks are near, so no proxy is asked for them;
what may carry an API key follows no redirect either.
"""

from __future__ import annotations

import urllib.request
from typing import Any


def direct_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Whatever http_proxy says."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an HTTPError."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


DIRECTLY = direct_opener()
_WITH_A_KEY = direct_opener(_NoRedirects())


def get(url: str, key: str, timeout_s: float) -> bytes:
    """`key`: an API key; "" for none. Raises OSError, ValueError for what is no address."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(url, headers=headers)
    with _WITH_A_KEY.open(asked, timeout=timeout_s) as answer:
        return bytes(answer.read())
