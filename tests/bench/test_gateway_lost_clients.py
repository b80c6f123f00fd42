"""What the measurement of clients that leave takes for free."""

from __future__ import annotations

import asyncio
import random
from itertools import chain, repeat

import pytest

from bench.gateway import lost_clients
from bench.gateway.lost_clients import LostBench
from loadtest.client.server import Addresses
from loadtest.harness.server import CannotMeasure

USED = 'mooncake_pages_used{model="decode_0"} 7\nmooncake_output_tokens_total{model="decode_0"} 5\n'
IN_HAND = 'mooncake_pages_used{model="decode_0"} 0\nmooncake_gateway_requests_in_flight{} 1\n'
FREE = 'mooncake_pages_used{model="decode_0"} 0\nmooncake_output_tokens_total{model="decode_0"} 9\n'


def bench_of(monkeypatch: pytest.MonkeyPatch, *pages: str) -> LostBench:
    """Its pages, of which the last stays."""
    coming = chain(pages, repeat(pages[-1]))
    monkeypatch.setattr(lost_clients, "fetch_page", lambda url: next(coming))
    monkeypatch.setattr(lost_clients, "LOOK_S", 0.0)
    return LostBench(Addresses("", "", ""), "", "", random.Random(1))


def test_all_is_free_when_neither_a_worker_nor_the_gateway_has_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_of(monkeypatch, USED, USED, IN_HAND, FREE)
    found = asyncio.run(bench.until_free())
    assert found.tokens == 4 and found.page_s > 0 and found.slot_s == 0


def test_what_stays_in_use_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_clients, "FREE_S_MAX", 0.0)
    with pytest.raises(CannotMeasure, match="pages_used"):
        asyncio.run(bench_of(monkeypatch, USED).until_free())
    with pytest.raises(CannotMeasure, match="no page"):
        asyncio.run(bench_of(monkeypatch, FREE).until_used())
