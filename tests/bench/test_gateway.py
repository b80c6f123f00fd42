"""What the measurement of the gateway takes for a measurement."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from bench.gateway import loads
from bench.gateway.loads import GatewayWay
from loadtest.client import sse_client
from loadtest.client.sse_client import SseAnswer
from loadtest.harness.server import CannotMeasure


def test_a_user_who_is_refused_has_not_left_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that does not grow under refusals says nothing about users who leave."""
    monkeypatch.setattr(loads, "LEAVING_SHARE", 1.0)

    async def refused(*_: Any, **__: Any) -> SseAnswer:
        await asyncio.sleep(0)
        return SseAnswer(status=503)

    monkeypatch.setattr(sse_client, "ask", refused)
    soak = loads.soak(GatewayWay("127.0.0.1:1", ""), 1, 0.05, lambda: 1, random.Random(1))
    with pytest.raises(CannotMeasure, match="503"):
        asyncio.run(soak)
