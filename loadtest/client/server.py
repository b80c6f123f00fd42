"""A server as its clients see it: its addresses and its description.

The first source that has a fact (block size, context length, vocabulary) wins. The sources are: the
command line; the `conductor` model, which answers a request with the parameter `describe` by JSON
in `text_output`; the parameters of its config.pbtxt; the values of the demo repository, which are
reported as assumptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.client.answer import ReceivedAnswer
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.sse_client import SseClient
from loadtest.client.triton_client import PROBE_S_MAX, TritonClient

ASSUMED = {"block_tokens": 64, "context_tokens_max": 8_192, "vocabulary_tokens": 2_048}
ASSUMED_SPECIAL_TOKEN_IDS = tuple(range(16))  # the demo's are 0, 1 and 2

DESCRIBE = GenerateRequest("describe", parameters={"describe": True})
# errors of a server without `describe`
NOT_UNDERSTOOD = ("invalid_request", "server_error", "incomplete")


@dataclass(frozen=True, slots=True)
class Addresses:
    grpc: str
    http: str
    metrics: str

    @property
    def metrics_url(self) -> str:
        return f"http://{self.metrics}/metrics"


def addresses_of(grpc: str) -> Addresses:
    """By the gRPC port: HTTP is the port before, metrics the one after, as Triton has them."""
    host, _, port = grpc.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{grpc!r} is not a gRPC address; write for example 127.0.0.1:8001")
    return Addresses(grpc, f"{host}:{int(port) - 1}", f"{host}:{int(port) + 1}")


@dataclass(frozen=True, slots=True)
class ServerDescription:
    block_tokens: int
    context_tokens_max: int
    vocabulary_tokens: int
    special_token_ids: tuple[int, ...] = ASSUMED_SPECIAL_TOKEN_IDS
    assumed: tuple[str, ...] = ()  # names of the fields that no source has


def description(*sources: Mapping[str, Any]) -> ServerDescription:
    """The first value of a source for each field; missing fields are assumed."""
    values: dict[str, int] = {}
    for name in ASSUMED:
        for source in sources:
            if source.get(name) is not None:
                values[name] = int(source[name])
                break
    assumed = tuple(name for name in ASSUMED if name not in values)
    special = ASSUMED_SPECIAL_TOKEN_IDS
    for source in reversed(sources):
        if isinstance(found := source.get("special_token_ids"), list):
            special = tuple(found)
    return ServerDescription(**(ASSUMED | values), special_token_ids=special, assumed=assumed)


async def describe_server(
    client: TritonClient, chosen: Mapping[str, int | None]
) -> ServerDescription:
    """Raises ServerError when the server or the model is not there."""
    configured = await client.model_parameters()
    return description(chosen, await ask_description(client), configured)


async def ask_description(client: TritonClient | SseClient) -> Mapping[str, Any]:
    """The description that `conductor` sends, over Triton's gRPC or HTTP."""
    answer = ReceivedAnswer()
    try:
        async for event in client.generate(DESCRIBE, PROBE_S_MAX):
            answer.add(event)
    except ServerError as error:
        if error.kind not in NOT_UNDERSTOOD:
            raise
        return {}
    return described(answer)


def described(answer: ReceivedAnswer) -> Mapping[str, Any]:
    """The answer to DESCRIBE; empty when the model took it for an ordinary request."""
    facts = json.loads(answer.text) if answer.finish_reason == "described" else {}
    return facts if isinstance(facts, dict) else {}
