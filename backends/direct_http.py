"""HTTP requests without a proxy, and without redirects where an API key is sent.

By default urllib uses the proxy of `http_proxy`, and follows a redirect to any host with the same
headers. The servers called here are in the cluster's network, so they need no proxy. A redirect
would send the API key to another host.
"""

from __future__ import annotations

import urllib.request
from typing import Any


def direct_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener that ignores http_proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTPError."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


DIRECTLY = direct_opener()
_WITH_A_KEY = direct_opener(_NoRedirects())


def get(url: str, key: str, timeout_s: float) -> bytes:
    """The body at `url`. `key`: an API key, or "". Raises OSError for a broken connection and for
    any status but 2xx, ValueError for a bad URL, and HTTPException for a bad answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)
    with _WITH_A_KEY.open(request, timeout=timeout_s) as answer:
        return bytes(answer.read())
