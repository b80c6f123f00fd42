"""Pictures of the papers' figures as simulated here, with the papers' points beside ours.

They are drawn from the rows of a result, as in ../pictures.py. A line or a hollow mark is the
paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import NullLocator

from bench.paper.pictures import bar_panels, draw_bars, draw_line, numbers, values_of
from loadtest.report.pictures.style import MANY, NAMED
from loadtest.simulator.pictures import DOTS_PER_INCH, Row, finish_panel, number_of, panels_beside

PAPER_BASELINES = ("vllm", "vllm, one at a time")


def save_gpu_time(path: Path, rows: Sequence[Row]) -> None:
    """GPU time of each system over ours, one panel a trace."""
    columns = (("of_mooncake", "paper_of_mooncake", "{} trace"),)
    figure, panels = bar_panels(rows, "trace", "system", columns, 4.2)
    panels[0].set_ylabel("GPU time / ours (lines: the paper)")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_capacity(path: Path, rows: Sequence[Row]) -> None:
    """Share within the service levels by speed, one panel for each trace and limit; a row of panels
    a trace would be too small."""
    traces, limits = values_of(rows, "trace"), ("100", "200", "300")
    figure, panels = panels_beside(len(traces) * len(limits), 3.4 * len(traces) * len(limits))
    for number, panel in enumerate(panels):
        trace, limit = traces[number // len(limits)], limits[number % len(limits)]
        chosen = [row for row in rows if row["trace"] == trace]
        for system, colour in zip(values_of(chosen, "system"), MANY, strict=False):
            points = sorted(
                (number_of(row, "speed"), number_of(row, f"within_{limit}_ms_percent"))
                for row in chosen
                if row["system"] == system
            )
            panel.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=system)
        compared = [number_of(row, "speed") for row in chosen if row["is_compared_at"]]
        gain = 100 * number_of(chosen[0], f"paper_gain_{limit}_ms")
        if compared:
            panel.axvline(compared[0], color=NAMED["ink"], linewidth=0.8)
            panel.text(compared[0], 4, f" the paper: +{gain:.0f} %", fontsize=8)
        panel.set_xlabel("times as fast as recorded")
        panel.set_ylim(0, 102)
        finish_panel(panel, f"{trace}, TBT <= {limit} ms", axis="both")
    panels[0].set_ylabel("requests within TTFT <= 30 s and TBT, %")
    panels[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_global_cache(path: Path, rows: Sequence[Row]) -> None:
    """Hit rate and GPU time of each policy over load balancing with local caches."""
    columns = (
        ("hits_of_load_balance", "paper_hits_of_local", "{}: hit rate"),
        ("time_of_load_balance", "paper_time_of_local", "{}: GPU time of prefill"),
    )
    figure, panels = bar_panels(rows, "trace", "policy", columns, 6.4)
    panels[0].set_ylabel("of load_balance (lines: the paper's best)")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_pd_ratio(path: Path, rows: Sequence[Row]) -> None:
    """Share within the limits, TTFT and TBT by the number of prefill nodes."""
    figure, panels = panels_beside(3, 10.0)
    for panel, (column, title) in zip(
        panels,
        (
            ("within_percent", "requests within both, %"),
            ("ttft_mean_s", "mean TTFT, s"),
            ("tbt_decode_mean_s", "mean TBT while decoding, s"),
        ),
        strict=True,
    ):
        draw_line(panel, rows, "prefills", column, MANY[0], "ours")
        panel.set_xlabel("prefill nodes of 16")
        finish_panel(panel, title, axis="both")
    papers = [row for row in rows if row["paper_tbt_s"] is not None]
    draw_line(panels[2], papers, "prefills", "paper_tbt_s", NAMED["ink"], "the paper", "s")
    panels[0].axvspan(7, 9, color=NAMED["pale"], alpha=0.4, label="the paper: best near 1:1")
    for panel in (panels[0], panels[2]):
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_long_prefix(path: Path, rows: Sequence[Row]) -> None:
    """Prefill time and TTFT by length, by where 95 % of the prompt is cached."""
    figure, panels = panels_beside(2, 8.0)
    for panel, (column, title) in zip(
        panels, (("prefill_s", "prefill, s"), ("ttft_s", "TTFT, s")), strict=True
    ):
        for where, colour in zip(values_of(rows, "cached"), MANY, strict=False):
            chosen = [row for row in rows if row["cached"] == where]
            draw_line(panel, chosen, "prompt_tokens", column, colour, f"95 % on: {where}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens of the prompt")
        finish_panel(panel, title, axis="both")
    bare = [row for row in rows if row["paper_prefill_s"] is not None]
    draw_line(panels[0], bare, "prompt_tokens", "paper_prefill_s", NAMED["ink"], "the paper", "s")
    for panel, column, paper in (
        (panels[0], "prefill_s", "paper_prefill_less_percent"),
        (panels[1], "ttft_s", "paper_ttft_less_percent"),
    ):
        longest = [row for row in rows if row["prompt_tokens"] == rows[-1]["prompt_tokens"]]
        less = next(number_of(row, paper) for row in longest if row[paper] is not None)
        at = number_of(longest[0], column) * (1 - less / 100)
        label = f"the paper: {less:.0f} % less"
        panel.plot(
            number_of(longest[0], "prompt_tokens"),
            at,
            "D",
            mfc="none",
            color=NAMED["ink"],
            label=label,
        )
        panel.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_bandwidth(path: Path, rows: Sequence[Row]) -> None:
    """Mean TTFT by the speed of the cards, and the paper's bound."""
    figure, (panel,) = panels_beside(1, 5.0)
    draw_line(panel, rows, "gbps", "ttft_mean_s", MANY[0], "with the hand-over to decode")
    draw_line(panel, rows, "gbps", "ttft_prefill_mean_s", MANY[1], "until the prompt is computed")
    panel.hlines(2.0, 100, 800, color=NAMED["ink"], label="the paper: below this from 100 Gb/s on")
    panel.set_xscale("log")
    panel.set_yscale("log")
    speeds = numbers(rows, "gbps")
    panel.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("network of each node, Gb/s")
    panel.set_ylabel("mean TTFT, s")
    panel.legend(frameon=False, fontsize=8)
    finish_panel(panel, "synthetic trace, 8P+8D", axis="both")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_replicas(path: Path, rows: Sequence[Row]) -> None:
    """Copies over time of blocks by rank, one panel a policy."""
    policies = values_of(rows, "policy")
    figure, panels = panels_beside(len(policies), 4.6 * len(policies))
    ranks = [column for column in rows[0] if column.startswith("copies_")]
    for panel, policy in zip(panels, policies, strict=True):
        chosen = [row for row in rows if row["policy"] == policy]
        for column, colour in zip(ranks, MANY, strict=False):
            label = column.removeprefix("copies_").replace("_", " ")
            draw_line(panel, chosen, "at_s", column, colour, label)
        panel.set_xlabel("s since the first request")
        finish_panel(panel, policy, axis="both")
        if chosen[0]["paper"]:
            panel.axhline(
                8,
                color=NAMED["ink"],
                linestyle=":",
                label=f"the paper, top 100: {chosen[0]['paper']}",
            )
        panel.legend(frameon=False, fontsize=7)
    panels[0].set_ylabel("prefill nodes with a copy")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_real(path: Path, rows: Sequence[Row]) -> None:
    """Both curves of TTFT and TBT, with the limits and the paper's points."""
    figure, panels = panels_beside(2, 9.0)
    for panel, (column, title, limit_s) in zip(
        panels, (("ttft_s", "TTFT, s", 30.0), ("tbt_s", "TBT, s", 0.1)), strict=True
    ):
        for name, colour in zip(values_of(rows, "name"), MANY, strict=False):
            chosen = [row for row in rows if row["name"] == name and row[column] is not None]
            draw_line(panel, chosen, column, "percentile", colour, name)
            if column == "tbt_s":
                paper = number_of(chosen[0], "paper_tbt_met_percent")
                panel.plot(
                    limit_s,
                    paper,
                    "s",
                    mfc="none",
                    color=colour,
                    markersize=9,
                    label=f"the paper, {name}: {paper:.0f} %",
                )
        panel.axvline(limit_s, color=NAMED["ink"], linewidth=0.8)
        panel.set_xscale("log")
        panel.legend(frameon=False, fontsize=7)
        finish_panel(panel, title, axis="both")
    panels[0].set_ylabel("requests below, %")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_poisson(path: Path, rows: Sequence[Row]) -> None:
    """The rate of each system, one panel a workload, in units of the paper's baseline."""
    workloads = values_of(rows, "workload")
    figure, panels = panels_beside(len(workloads), 3.4 * len(workloads), 4.2)
    for panel, workload in zip(panels, workloads, strict=True):
        chosen = [row for row in rows if row["workload"] == workload]
        base = max(
            number_of(row, "requests_per_s") for row in chosen if row["system"] in PAPER_BASELINES
        )
        values = [number_of(row, "requests_per_s") / (base or 1.0) for row in chosen]
        draw_bars(
            panel, [str(row["system"]) for row in chosen], values, [None] * len(chosen), ".2f"
        )
        panel.axhline(1.0, color=NAMED["muted"], linewidth=0.8)
        finish_panel(panel, f"{workload} (the paper: +{chosen[0]['paper_gain_percent']} %)")
    panels[0].set_ylabel("requests/s over the paper's baseline")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_cache_policies(path: Path, rows: Sequence[Row]) -> None:
    """Hit rate by capacity, one panel a trace; dotted: the report's trace."""
    traces, policies = values_of(rows, "trace"), values_of(rows, "policy")
    figure, panels = panels_beside(len(traces), 4.6 * len(traces))
    for panel, trace in zip(panels, traces, strict=True):
        for policy, colour in zip(policies, MANY, strict=False):
            chosen = [
                row
                for row in rows
                if row["trace"] == trace and row["policy"] == policy and row["blocks"] is not None
            ]
            draw_line(panel, chosen, "blocks", "hit_percent", colour, policy)
            if chosen[0]["paper_hit_percent"] is not None:
                draw_line(
                    panel,
                    chosen,
                    "blocks",
                    "paper_hit_percent",
                    colour,
                    f"{policy}, the paper's trace",
                    ":",
                )
        panel.set_xscale("log")
        panel.set_xlabel("blocks of 512 tokens")
        finish_panel(panel, f"{trace} trace", axis="both")
        panel.legend(frameon=False, fontsize=7)
    panels[0].set_ylabel("hits, % of block references")
    figure.savefig(path, dpi=DOTS_PER_INCH)


SAVE = {
    "gpu-time": save_gpu_time,
    "capacity": save_capacity,
    "global-cache": save_global_cache,
    "pd-ratio": save_pd_ratio,
    "long-prefix": save_long_prefix,
    "bandwidth": save_bandwidth,
    "replicas": save_replicas,
    "real": save_real,
    "simulated-long": save_poisson,
    "datasets": save_poisson,
    "cache-policies": save_cache_policies,
}
