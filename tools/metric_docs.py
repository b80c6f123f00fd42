"""Prints docs/metrics.md: `python -m tools.metric_docs > docs/metrics.md`.

The table of metrics for people, and queries to begin with. A test compares the file with this
output (tests/backends/metrics/test_table.py). Not here: the metrics (backends/metrics/table.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.metrics.table import SECTIONS, Label, Metric

HEAD = """# Metrics

Made by `python -m tools.metric_docs > docs/metrics.md`; a test holds it up to date.

On the metrics port (`http://127.0.0.1:8002/metrics`; `--metrics-address` for other hosts than this
one): one page of all Tritons of `mooncake serve`, refreshed five times a second. Each series of
ours has a label `model`, the Triton model that it is of: "of" says of which backends. Triton's own
`nv_*` have a label `triton` as well, or instead (`nv_cpu_*`): `frontend`, or the worker whose
Triton it is. Counters go on when a
model is loaded anew or its Triton is started again; gauges of a model that is gone are 0 or not
there.
*(use)*: a gauge that is 0 when nothing is going on. `mooncake status` shows the most important ones
in a terminal.
"""

QUERIES: tuple[tuple[str, str], ...] = (
    ("P90 of TTFT",
     "histogram_quantile(0.9, sum by (le) (rate(mooncake_ttft_seconds_bucket[5m])))"),
    ("P90 of TBT",
     "histogram_quantile(0.9, sum by (le) (rate(mooncake_tbt_seconds_bucket[5m])))"),
    ("Mean time per token of streams",
     "sum(rate(mooncake_token_interval_seconds_total[5m]))"
     " / sum(rate(mooncake_token_intervals_total[5m]))"),
    ("Hit rate: prompt tokens that nobody had to compute",
     'sum(rate(mooncake_prompt_tokens_total{path!="computed"}[5m]))'
     " / sum(rate(mooncake_prompt_tokens_total[5m]))"),
    ("Goodput: the share of all requests that were answered within both limits",
     "sum(rate(mooncake_requests_within_slo_total[5m]))"
     " / sum(rate(mooncake_requests_total[5m]))"),
    ("Predicted over actual TTFT: above 1 the conductor is too careful",
     'sum(rate(mooncake_ttft_prediction_seconds_total{kind="predicted"}[5m]))'
     ' / sum(rate(mooncake_ttft_prediction_seconds_total{kind="actual"}[5m]))'),
    ("Copies of a block in DRAM, by how hot it is",
     "max by (heat) (mooncake_hot_block_copies) / (max by (heat) (mooncake_hot_blocks) > 0)"),
    ("Share of all requests with a TTFT of at most 1 s",
     'sum(rate(mooncake_ttft_seconds_bucket{le="1"}[5m]))'
     " / sum(rate(mooncake_requests_total[5m]))"),
    ("Rejections by reason, per second",
     "sum by (reason) (rate(mooncake_rejections_total[5m])) > 0"),
    ("VRAM occupation cost of a generated token, in byte seconds",
     "sum(rate(mooncake_kv_occupation_byte_seconds_total[5m]))"
     " / sum(rate(mooncake_output_tokens_total[5m]))"),
    ("How full the KV memory of each worker is",
     "mooncake_pages_used / (mooncake_pages_max > 0)"),
    ("How busy each engine is, 1 = always in a step",
     "rate(mooncake_step_seconds_total[1m])"),
    ("Bytes per second between nodes",
     'sum by (model) (rate(mooncake_transfer_bytes_total{transport="nixl"}[1m]))'),
    ("Median error of the predicted TTFT",
     "histogram_quantile(0.5,"
     " sum by (le) (rate(mooncake_ttft_prediction_error_ratio_bucket[15m])))"),
    ("A decode worker's metrics by its storage node",
     "mooncake_requests_running * on (model) group_left (node) (mooncake_worker_info == 1)"),
)  # fmt: skip


def page() -> str:
    lines = [HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| metric | kind | unit | of | meaning |", "|-|-|-|-|-|"]
        lines += [_row(metric) for metric in metrics]
        lines.append("")
    lines += ["## Buckets", ""]
    for buckets, unit in dict.fromkeys(_buckets()):
        lines += [f"In {unit}: {', '.join(f'{bound:g}' for bound in buckets)}, +Inf.", ""]
    lines += ["## Queries to begin with", ""]
    for what, query in QUERIES:
        lines += [f"{what}:", "", "```promql", query, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(metric: Metric) -> str:
    name = f"`{metric.name}`" + "".join(f"<br>{_label(label)}" for label in metric.labels)
    kind = f"{metric.kind} *(use)*" if metric.is_use else metric.kind
    return (
        f"| {name} | {kind} | {metric.unit} | {', '.join(metric.publishers)} | {metric.meaning} |"
    )


def _label(label: Label) -> str:
    return f"`{label.name}`" + (f": {', '.join(label.values)}" if label.values else "")


def _buckets() -> Sequence[tuple[tuple[float, ...], str]]:
    every = [metric for metrics in SECTIONS.values() for metric in metrics]
    return [(metric.buckets, metric.unit) for metric in every if metric.buckets]


if __name__ == "__main__":
    print(page(), end="")
