"""What the measurement of the gateway takes for a measurement."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psutil
import pytest

from bench.gateway import __main__ as gateway
from bench.gateway import loads
from bench.gateway.loads import DirectWay, GatewayWay, StreamLoad
from loadtest.client import sse_client
from loadtest.client.server import Addresses
from loadtest.client.sse_client import SseAnswer
from loadtest.harness.benchmark import BenchmarkRun
from loadtest.harness.server import CannotMeasure, OwnServer


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


def test_streams_are_counted_by_their_tokens_and_by_cpu_time_per_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def streams(way: DirectWay | GatewayWay, *_: Any) -> StreamLoad:
        await asyncio.sleep(0)
        return StreamLoad(400, 100, 2.0 if isinstance(way, DirectWay) else 4.0)

    times_s = iter(range(1_000))
    monkeypatch.setattr(loads, "streams", streams)
    monkeypatch.setattr(gateway, "gateway_process", lambda pid: psutil.Process())
    monkeypatch.setattr(gateway, "cpu_s", lambda process: next(times_s) * 1e-3)
    run, server = BenchmarkRun(), OwnServer(Addresses("", "", ""), 1)
    ways: gateway.Ways = {"direct": DirectWay(""), "gateway": GatewayWay("", "")}
    gateway.measure_streams(run, ways, server, 1)
    [row] = run.rows
    assert (row["direct_tokens_per_s"], row["gateway_tokens_per_s"]) == (200.0, 100.0)
    assert row["messages"] == gateway.ROUNDS * 100
    values = {target.name: target.value for target in run.targets}
    assert values["stream_throughput_over_direct"] == 0.5
    assert values["gateway_cpu_us_per_message"] == pytest.approx(10.0)
