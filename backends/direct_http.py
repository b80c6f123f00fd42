"""HTTP requests without a proxy, and without redirects where an API key is sent.

The callers of this module call servers in the cluster's network, which need no proxy. By default,
urllib uses the proxy in the variable http_proxy. It also follows a redirect to any host with the
same headers, so the other host would get the API key.
"""

from __future__ import annotations

import urllib.request
from http.client import HTTPException
from typing import Any

# Raised by a call and by reading its answer: a broken connection, a status other than 2xx, or an
# answer that is not valid HTTP. urllib passes HTTPException on, which is not an OSError.
CALL_FAILED = (OSError, HTTPException)


def direct_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener that uses no proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect raise an HTTPError."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


DIRECTLY = direct_opener()
_WITH_A_KEY = direct_opener(_NoRedirects())


def get(url: str, key: str, timeout_s: float) -> bytes:
    """GET `url` and return the body. `key`: an API key; "": none. Raises OSError for a broken
    connection or a status other than 2xx. Bad URL: ValueError. Invalid HTTP: HTTPException."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)
    with _WITH_A_KEY.open(request, timeout=timeout_s) as answer:
        return bytes(answer.read())
