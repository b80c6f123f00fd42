"""A server of OpenAI's interface as its clients see it: its address and its description.

/v1/models describes it: the model's name, the length of its context (`max_model_len`, as in vLLM),
and, of our gateway, the other facts that a run needs. Missing facts are assumed and named, as in
server.py.
"""

from __future__ import annotations

import json
import os
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from backends.direct_http import get
from loadtest.client.http_interfaces import OpenAiInterface
from loadtest.client.protocol import ServerError

PROBE_S_MAX = 10.0
ADDRESS = "127.0.0.1:9000"
KEY_VARIABLE = "OPENAI_API_KEY"  # the name that clients of OpenAI's interface use
START_ONE = "start one with `mooncake serve --openai-port 9000`, or name its address"


@dataclass(frozen=True, slots=True)
class HttpAddress:
    host: str
    port: int
    is_tls: bool = False

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http{'s' if self.is_tls else ''}://{self.netloc}"

    @property
    def metrics_url(self) -> str:
        """The gateway serves the launcher's page."""
        return f"{self.url}/metrics"

    def key_for(self, page: str, key: str) -> str:
        """`key` where `page` is `metrics_url` in any notation; "" for any other page."""
        try:
            parts = urlsplit(page)
            server = http_address(f"{parts.scheme}://{parts.netloc}")
        except ValueError:
            return ""
        return key if server == self and parts.path == "/metrics" else ""


def http_address(text: str) -> HttpAddress:
    """HOST:PORT, http://HOST:PORT or https://HOST, each also with /v1; else ValueError."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    is_tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if is_tls else 80 if "://" in text else 0)
    except ValueError:
        port = 0
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port
        or (parts.path.rstrip("/") not in ("", "/v1"))
    ):
        raise ValueError(
            f"{text!r} is no address of OpenAI's interface; write for example {ADDRESS}"
        )
    return HttpAddress(parts.hostname, port, is_tls)


def own_key() -> str:
    """The API key of the environment; "" without one."""
    return os.environ.get(KEY_VARIABLE, "")


@dataclass(frozen=True, slots=True)
class ServedByOpenAi:
    model: str
    facts: Mapping[str, Any]  # in the form of server.description


def served_at(address: HttpAddress, model: str = "", key: str = "") -> ServedByOpenAi:
    """`model`: the wanted one, "" for the first. Raises ServerError."""
    url = f"{address.url}/v1/models"
    try:
        said = json.loads(get(url, key, PROBE_S_MAX))
        models = {str(each["id"]): each for each in said["data"]}
    except urllib.error.HTTPError as error:
        refused = OpenAiInterface().refusal(
            error.code, error.headers.get("Retry-After", ""), error.read()
        )
        raise ServerError(refused.kind, f"{url}: {refused.message}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ServerError("unreachable", f"{url}: {reason}; {START_ONE}") from None
    except (ValueError, KeyError, TypeError):
        what = f"{url}: the server there has no OpenAI interface; {START_ONE}"
        raise ServerError("unreachable", what) from None
    if not models:
        raise ServerError("unavailable", f"{url}: the server has no model")
    if model and model not in models:
        known = ", ".join(models)
        raise ServerError("invalid_request", f"{url}: there is no model {model!r}; served: {known}")
    found = models[model or next(iter(models))]
    names = ("block_tokens", "vocabulary_tokens", "special_token_ids")
    facts = {name: found.get(name) for name in names}
    facts["context_tokens_max"] = found.get("max_model_len")
    return ServedByOpenAi(str(found["id"]), facts)
