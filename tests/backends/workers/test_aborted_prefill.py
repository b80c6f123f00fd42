"""What was computed of a prompt that then left is counted, so that waste can be told."""

from __future__ import annotations

import pytest

from backends.metrics.page import MetricPage
from tests.backends.metrics.test_page import Triton
from tests.backends.stepped_site import Site

CHUNK_TOKENS = 8  # of the site's prefill worker


def aborted_tokens(site: Site) -> float:
    triton = Triton()
    MetricPage("prefill", triton).take(site.prefill.process.observations)
    return triton["mooncake_aborted_prefill_tokens_total"]


def test_a_prompt_that_is_stopped_after_its_first_chunk_wasted_that_chunk(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(seed, monkeypatch)
    client = site.ask(list(range(20)), 4)
    while not site.prefill.jobs[client.request_id].computed_tokens:
        site.turn(site.prefill)
        if todo := site.things_to_do():
            todo[0]()
    site.prefill.stop(client.request_id)
    site.settle()
    assert client.error is not None
    assert aborted_tokens(site) == CHUNK_TOKENS


def test_a_prompt_that_is_answered_wasted_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(seed, monkeypatch)
    client = site.ask(list(range(20)), 4)
    site.settle()
    assert client.error is None
    assert aborted_tokens(site) == 0
