"""What a run has to know of the server: block size, context length, vocabulary.

Asked in this order, the first answer wins: the command line, the `conductor` model (a request with
the parameter `describe` is answered with JSON in `text_output`), the parameters of its
config.pbtxt, and last the values of the demo repository, which are named as assumptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.protocol import GenerateRequest, ServerError
from loadtest.triton_client import PROBE_S_MAX, TritonClient

ASSUMED = {"block_tokens": 64, "context_tokens_max": 8_192, "vocabulary_tokens": 2_048}
ASSUMED_SPECIAL_TOKEN_IDS = tuple(range(16))  # the demo's are 0, 1 and 2


@dataclass(frozen=True, slots=True)
class ServerDescription:
    block_tokens: int
    context_tokens_max: int
    vocabulary_tokens: int
    special_token_ids: tuple[int, ...] = ASSUMED_SPECIAL_TOKEN_IDS
    assumed: tuple[str, ...] = ()  # names of the fields that nobody said


def description(*sources: Mapping[str, Any]) -> ServerDescription:
    """The first value that a source has for each field; what none has is assumed."""
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
    return description(chosen, await _described(client), configured)


async def _described(client: TritonClient) -> Mapping[str, Any]:
    """What the model says of itself; empty when it does not know the question."""
    request = GenerateRequest("describe", parameters={"describe": True})
    try:
        events = [event async for event in client.generate(request, PROBE_S_MAX)]
    except ServerError as error:
        if error.kind in ("invalid_request", "server_error", "incomplete"):
            return {}
        raise
    facts = json.loads(events[-1].text) if events[-1].finish_reason == "described" else {}
    return facts if isinstance(facts, dict) else {}
