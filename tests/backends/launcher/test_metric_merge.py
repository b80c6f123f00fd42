"""The pages of several Tritons become one that Prometheus can read."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from backends.launcher.metrics_server import MergedPage

OURS = {"mooncake_tokens_total": 1, "mooncake_pages": 1, "mooncake_wait_seconds": 1}


def a_page(model: str, tokens: int, pages: int, seconds: float) -> str:
    return f"""\
# HELP mooncake_tokens_total Tokens
# TYPE mooncake_tokens_total counter
mooncake_tokens_total{{model="{model}",path="a b,c"}} {tokens}
# HELP mooncake_pages Pages in use
# TYPE mooncake_pages gauge
mooncake_pages{{model="{model}"}} {pages}.000000
# HELP mooncake_wait_seconds How long
# TYPE mooncake_wait_seconds histogram
mooncake_wait_seconds_count{{model="{model}"}} 1
mooncake_wait_seconds_sum{{model="{model}"}} {seconds}
mooncake_wait_seconds_bucket{{model="{model}",le="0.1"}} 0
mooncake_wait_seconds_bucket{{model="{model}",le="+Inf"}} 1
# HELP nv_pinned_memory_pool_total_bytes Memory
# TYPE nv_pinned_memory_pool_total_bytes gauge
nv_pinned_memory_pool_total_bytes 268435456
# HELP nv_inference_count Requests
# TYPE nv_inference_count counter
nv_inference_count{{model="{model}",version="1"}} {tokens}
"""


def read(page: MergedPage) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.text())
        for sample in family.samples
    }


def value(page: MergedPage, name: str, **labels: str) -> float | None:
    found = {
        key: value
        for key, value in read(page).items()
        if key[0] == name and labels.items() <= dict(key[1]).items()
    }
    return sum(found.values()) if found else None


@pytest.fixture
def page() -> MergedPage:
    made = MergedPage(OURS)
    made.take("decode_0", 1, a_page("decode_0", 5, 2, 0.5))
    made.take("decode_1", 2, a_page("decode_1", 7, 3, 1.5))
    return made


def test_each_family_is_described_once_and_has_the_series_of_all(page: MergedPage) -> None:
    text = page.text()
    for name in (*OURS, "nv_inference_count", "nv_pinned_memory_pool_total_bytes"):
        assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} ") == 1, name
    assert value(page, "mooncake_tokens_total", model="decode_1", path="a b,c") == 7
    assert value(page, "mooncake_wait_seconds_sum") == 2.0


def test_triton_s_own_series_are_kept_apart_and_ours_keep_their_labels(page: MergedPage) -> None:
    for triton in ("decode_0", "decode_1"):
        assert value(page, "nv_pinned_memory_pool_total_bytes", triton=triton) == 268435456
        wanted = f'nv_inference_count{{model="{triton}",version="1",triton="{triton}"}} '
        assert wanted in page.text()
    assert not [key for key in read(page) if key[0] in OURS and "triton" in dict(key[1])]


def test_no_counter_falls_when_a_triton_is_started_again(page: MergedPage) -> None:
    page.take("decode_0", 3, a_page("decode_0", 1, 0, 0.25))
    assert value(page, "mooncake_tokens_total", model="decode_0") == 6
    assert value(page, "mooncake_wait_seconds_sum", model="decode_0") == 0.75
    assert value(page, "mooncake_wait_seconds_bucket", model="decode_0", le="+Inf") == 2
    assert value(page, "mooncake_pages", model="decode_0") == 0


def test_one_that_is_silent_uses_nothing_but_has_counted(page: MergedPage) -> None:
    page.silent("decode_0")
    assert value(page, "mooncake_pages", model="decode_0") is None
    assert value(page, "mooncake_tokens_total", model="decode_0") == 5
    page.take("decode_0", 1, a_page("decode_0", 6, 4, 0.5))
    assert value(page, "mooncake_pages", model="decode_0") == 4
    assert value(page, "mooncake_tokens_total", model="decode_0") == 6, "it counted on"


def test_a_page_of_a_life_that_is_over_comes_too_late(page: MergedPage) -> None:
    page.take("decode_1", 4, a_page("decode_1", 1, 0, 0.0))
    page.take("decode_1", 2, a_page("decode_1", 9, 9, 9.0))
    assert value(page, "mooncake_tokens_total", model="decode_1") == 8
