"""What is read from a Prometheus page, and what stands there again as its name."""

from __future__ import annotations

import pytest

from loadtest.client.metrics_page import counter_sum, series_key, series_of

PAGE = """# HELP mooncake_transfer_bytes_total Bytes
# TYPE mooncake_transfer_bytes_total counter
mooncake_transfer_bytes_total{model="prefill_0",transport="nixl"} 1000
mooncake_transfer_bytes_total{model="prefill_1",transport="nixl"} 2.5e+03
# TYPE up gauge
up 1
mooncake_transfer_bytes_total{model="prefill_1",transport="mapped"} 7
mooncake_transfer_bytes_totally_other 9
# TYPE nv_inference_count counter
nv_inference_count{model="a b, \\"c\\"",version="1"} 4
"""


def test_a_counter_is_summed_over_the_series_that_carry_the_labels() -> None:
    name = "mooncake_transfer_bytes_total"
    assert counter_sum(PAGE, name, {"transport": "nixl"}) == 3_500
    assert counter_sum(PAGE, name) == 3_507
    assert counter_sum(PAGE, name, {"transport": "tcp"}) is None
    assert counter_sum(PAGE, "up") == 1
    assert counter_sum(PAGE, "nv_inference_count", {"version": "1"}) == 4


def test_a_series_is_called_what_the_page_calls_it() -> None:
    lines = [line for line in PAGE.splitlines() if not line.startswith("#")]
    assert [series_key(series) for series in series_of(PAGE.splitlines())] == [
        line.rpartition(" ")[0] for line in lines
    ]


def test_a_line_that_is_no_series_is_an_error() -> None:
    with pytest.raises(ValueError):
        list(series_of(["mooncake_broken{"]))
