"""Metrics pages as a server shows them, made from a few numbers."""

from __future__ import annotations

from collections.abc import Mapping

from backends.metrics.status.view import Page, parse
from backends.metrics.table import METRICS

NV = """# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{model="conductor",version="1"} 4
"""


def text(series: Mapping[str, float]) -> str:
    """`mooncake_x{model="a"}` -> value; a name that the table lacks is a mistake of the test."""
    for key in series:
        name = key.split("{")[0]
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert name in METRICS or base in METRICS, name
    lines = [f"{key} {value}" for key, value in series.items()]
    return NV + "# TYPE mooncake_requests_total counter\n" + "\n".join(lines) + "\n"


def page(series: Mapping[str, float], read_at_s: float = 0.0) -> Page:
    return parse(text(series), read_at_s)


def histogram(name: str, counts: Mapping[str, float]) -> dict[str, float]:
    """Bound -> values up to it."""
    series = {f'{name}_bucket{{model="conductor",le="{le}"}}': n for le, n in counts.items()}
    series[f'{name}_count{{model="conductor"}}'] = counts["+Inf"]
    return series


def server(scale: float = 1.0) -> dict[str, float]:
    """A server with two workers in the midst of it; counters are `scale` times as high."""
    series = {
        'mooncake_start_time_seconds{model="conductor"}': 1000.0,
        'mooncake_start_time_seconds{model="prefill_0"}': 1060.0,
        'mooncake_start_time_seconds{model="decode_9"}': 0.0,  # was removed
        'mooncake_requests_live{model="conductor"}': 7,
        'mooncake_workers_live{model="conductor",role="prefill"}': 1,
        'mooncake_workers_live{model="conductor",role="decode"}': 0,
        'mooncake_workers_wanted{model="conductor",role="prefill"}': 2.25,
        'mooncake_workers_wanted{model="conductor2",role="prefill"}': 2.5,  # another frontend
        'mooncake_slo_seconds{model="conductor",limit="ttft"}': 2.5,
        'mooncake_slo_seconds{model="conductor",limit="tbt"}': 0.05,
        'mooncake_slo_seconds{model="conductor2",limit="ttft"}': 3.0,  # another frontend
        'mooncake_slo_seconds{model="conductor2",limit="tbt"}': 0.06,
        'mooncake_role_flips_proposed_total{model="conductor",role="prefill"}': 3,
        'mooncake_requests_total{model="conductor",outcome="answered"}': 100 * scale,
        'mooncake_requests_total{model="conductor",outcome="rejected"}': 10 * scale,
        'mooncake_requests_total{model="conductor",outcome="internal_error"}': 0,
        'mooncake_rejections_total{model="conductor",reason="ttft_slo"}': 10 * scale,
        'mooncake_rejections_total{model="conductor",reason="tbt_slo"}': 0,
        'mooncake_retries_total{model="conductor"}': 2,
        'mooncake_token_intervals_total{model="conductor"}': 1000 * scale,
        'mooncake_token_interval_seconds_total{model="conductor"}': 20 * scale,
        'mooncake_prompt_tokens_total{model="prefill_0",path="computed"}': 3000 * scale,
        'mooncake_prompt_tokens_total{model="prefill_0",path="local"}': 800 * scale,
        'mooncake_prompt_tokens_total{model="prefill_0",path="fetched"}': 200 * scale,
        'mooncake_output_tokens_total{model="prefill_0"}': 100 * scale,
        'mooncake_output_tokens_total{model="decode_0"}': 900 * scale,
        'mooncake_transfer_bytes_total{model="prefill_0",transport="nixl",direction="read"}': 1000
        * scale,
        'mooncake_transfer_bytes_total{model="decode_0",transport="nixl",direction="read"}': 3000
        * scale,
        'mooncake_transfer_failures_total{model="decode_0",transport="nixl"}': 3,
        'mooncake_store_bytes_used{model="conductor",node="s0"}': 2.5 * 2**20,
        'mooncake_store_bytes_max{model="conductor",node="s0"}': 5 * 2**20,
        'mooncake_store_bytes_max{model="conductor",node="s1"}': 0,  # is gone
        'mooncake_store_blocks{model="conductor",node="s0"}': 20,
        'mooncake_store_evictions_total{model="conductor",node="s0"}': 5 * scale,
        **histogram(
            "mooncake_ttft_seconds", {"0.1": 90 * scale, "0.2": 100 * scale, "+Inf": 100 * scale}
        ),
        **histogram("mooncake_tbt_seconds", {"0.1": 0, "+Inf": 0}),
    }
    for model, role in (("prefill_0", "prefill"), ("decode_0", "decode")):
        series |= {
            f'mooncake_worker_info{{model="{model}",role="{role}",node="s0",'
            'fingerprint="f",block_tokens="64"}': 1,
            f'mooncake_requests_running{{model="{model}"}}': 4,
            f'mooncake_requests_waiting{{model="{model}"}}': 3,
            f'mooncake_pages_used{{model="{model}"}}': 64,
            f'mooncake_pages_max{{model="{model}"}}': 256,
            f'mooncake_kv_bytes_used{{model="{model}"}}': 64 * 2**17,
            f'mooncake_kv_bytes_max{{model="{model}"}}': 256 * 2**17,
            f'mooncake_steps_total{{model="{model}"}}': 50 * scale,
            f'mooncake_step_seconds_total{{model="{model}"}}': 0.5 * scale,
        }
    series[
        'mooncake_worker_info{model="decode_9",role="decode",node="s0",'
        'fingerprint="f",block_tokens="64"}'
    ] = 0  # was removed
    return series
