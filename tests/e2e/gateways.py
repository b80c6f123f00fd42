"""The real server with OpenAI's interface and API keys, and a client of it."""

from __future__ import annotations

from typing import Any

import openai

from bench.clients.call_matrix import CalledServer
from bench.clients.keyed_gateway import KEY
from tests.e2e.server import Server


class Gateway:
    def __init__(self, server: Server, called: CalledServer) -> None:
        self.server, self.called = server, called
        self.url = called.url.removesuffix("/v1")

    def client(self, key: str = KEY, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.called.url, api_key=key, **more)
