"""The page of many runs: the trade-off between them, differing settings, and the best run.

It embeds the digests of its runs, so `mooncake report` reads it like the page of a run.

Not here: choosing the best run and the Pareto front (sweep.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.report import sweep
from loadtest.report.page import NOTHING, PageTable, ReportPage, ReportTile, Section
from loadtest.report.pictures.style import Picture, not_measured
from loadtest.report.pictures.tradeoff import RunAxis, TradeOff, lengths_of_runs, outcomes, tradeoff
from loadtest.results.digest import EMBEDDED_RUNS, RunDigest, digests_to_bytes
from loadtest.results.numbers import rate_text, setting_text, shown

COLUMNS_MAX = 10  # of differing settings
NUMBERS = (  # of each run, in the table
    ("requests", "requests", "count"), ("offered_per_s", "sent/s", "per_s"),
    ("goodput_share", "goodput", "share"), ("goodput_per_s", "goodput/s", "per_s"),
    ("answered_share", "answered", "share"), ("rejected_share", "rejected", "share"),
    ("failed_share", "failed", "share"), ("ttft_p90_s", "TTFT p90", "s"),
    ("tbt_p90_s", "TBT p90", "s"), ("requests_per_s", "answers/s", "per_s"),
    ("hit_rate", "hit rate", "share"),
)  # fmt: skip
GOODPUT_SHARE = RunAxis("goodput_share", "requests within their limits, share", "share", False)
GOODPUT_PER_S = RunAxis("goodput_per_s", "requests within their limits, per second", "per_s", False)
SENT = RunAxis(sweep.LOAD, "requests sent per second")
ANSWERS = RunAxis("requests_per_s", "answers per second", "per_s", False)
GOODPUT_OF_LOAD = (
    TradeOff(
        "Goodput against load, share",
        SENT,
        GOODPUT_SHARE,
        "Of all requests sent, the share that was answered within its limits.",
    ),
    TradeOff(
        "Goodput against load, per second",
        SENT,
        GOODPUT_PER_S,
        "Requests answered within their limits per second of the run, against those sent per "
        "second.",
        is_ideal_drawn=True,
    ),
)


def sweep_page(
    runs: Sequence[RunDigest],
    by: Sequence[str] = (),
    share: float = sweep.SHARE_LEAST,
    chosen: int | None = None,
) -> ReportPage:
    """`by`: settings or numbers that goodput is drawn against as well; `share`: as in
    sweep.best_of; `chosen`: the number of a run to mark instead of the best."""
    best = sweep.best_of(runs, share) if chosen is None else chosen
    why = sweep.best_text(runs, share) if chosen is None else f"chosen: run {chosen}"
    return ReportPage(
        title=f"{len(runs)} runs side by side",
        subtitle=", ".join(
            f"{sum(run.name == name for run in runs)} of {name}"
            for name in dict.fromkeys(run.name for run in runs)
        ),
        notes=sweep.warnings_of(runs),
        tiles=tiles(runs, best),
        sections=sections(runs, by, best, why),
        settings=sweep.same(runs),
        settings_heading="Settings of all runs",
        footer=[("mooncake report THIS.html OTHER.html", "lays more runs beside these")],
        embedded=[(EMBEDDED_RUNS, digests_to_bytes(runs).decode())],
    )


def sections(
    runs: Sequence[RunDigest], by: Sequence[str], best: int | None, why_best: str
) -> list[Section]:
    drawn = pictures(runs, by, best)
    return [
        Section(
            "Trade-off",
            [picture for picture in drawn if picture.svg],
            text=[
                f"{why_best[0].upper()}{why_best[1:]}.",
                *(f"{picture.title}: {picture.missing}" for picture in drawn if picture.missing),
            ],
        ),
        Section("Runs", tables=[runs_table(runs, best)]),
        Section("Outcomes of the requests", [outcomes(runs), lengths_of_runs(runs)]),
    ]


def tiles(runs: Sequence[RunDigest], best: int | None) -> list[ReportTile]:
    """The best run, and those that lead in one number."""
    found = []
    if best is not None:
        run = runs[best - 1]
        share = shown(run.numbers.get("goodput_share"), "share")
        found.append(
            ReportTile(
                "Best",
                [(f"run {best}", run.label)],
                f"{share} within their limits, "
                f"{shown(run.numbers.get('goodput_per_s'), 'per_s')} a second",
            )
        )
    for name, number, unit, is_less in (
        ("Most goodput", "goodput_per_s", "per_s", False),
        ("Lowest TTFT p90", "ttft_p90_s", "s", True),
        ("Most answers", "requests_per_s", "per_s", False),
    ):
        known = [
            (value, n)
            for n, run in enumerate(runs, 1)
            if (value := sweep.value_of(run, number)) is not None
        ]
        if not known:
            found.append(ReportTile(name, [(NOTHING, "")], "not measured in any run"))
            continue
        value, n = min(known) if is_less else max(known, key=lambda one: (one[0], -one[1]))
        text = f"{rate_text(value)}/s" if unit == "per_s" else shown(value, unit)
        found.append(ReportTile(name, [(text, f"run {n}")], runs[n - 1].label))
    return found


def pictures(runs: Sequence[RunDigest], by: Sequence[str], best: int | None) -> list[Picture]:
    found: list[TradeOff | Picture] = []
    if sweep.has_several_loads(runs):
        found += GOODPUT_OF_LOAD
    else:
        found.append(not_measured("Goodput against load", "all runs were sent the same load."))
    cost = sweep.cost_of(runs)
    if cost is None:
        costs = ", ".join(sweep.COSTS)
        why = f"no setting of all runs says what they take ({costs}), or it is the same."
        found.append(not_measured("Goodput against cost", why))
    else:
        axis = RunAxis(cost, cost, "count", True)
        caption = f"Requests answered within their limits per second, against {cost}."
        found.append(TradeOff(f"Goodput against {cost}", axis, GOODPUT_PER_S, caption))
    for name in by:
        axis = RunAxis(name, name)
        caption = f"Of all requests sent, the share within its limits, against {name}."
        found.append(TradeOff(f"Goodput against {name}", axis, GOODPUT_SHARE, caption))
    found += [_latency(what) for what in ("TTFT", "TBT")]
    return [one if isinstance(one, Picture) else tradeoff(runs, one, best) for one in found]


def _latency(what: str) -> TradeOff:
    field = f"{what.lower()}_s"
    axis = RunAxis(f"{what.lower()}_p90_s", f"{what} p90 of answers (logarithmic)", "s", True)
    return TradeOff(
        f"{what} p90 against throughput",
        ANSWERS,
        axis,
        f"The 90th percentile of {what} over the answered requests (what was rejected has "
        "none), against answers per second. Dashed: the service level.",
        level=lambda run: getattr(run.slo, field, None),
    )


def runs_table(runs: Sequence[RunDigest], best: int | None) -> PageTable:
    varied = sweep.different(runs)
    names = list(varied)[:COLUMNS_MAX]
    unbeaten = sweep.pareto_runs(runs)
    several_kinds = len({run.name for run in runs}) > 1
    rows = []
    for number, run in enumerate(runs, 1):
        mark = "best" if number == best else "Pareto" if number in unbeaten else ""
        rows.append(
            [
                str(number),
                run.label,
                *([run.name] if several_kinds else []),
                mark,
                *(
                    setting_text(run.settings[name]) if name in run.settings else NOTHING
                    for name in names
                ),
                *(
                    NOTHING if (value := sweep.value_of(run, name)) is None else shown(value, unit)
                    for name, _, unit in NUMBERS
                ),
            ]
        )
    words = [n for n, name in enumerate(names) if any(isinstance(v, str) for v in varied[name])]
    first = 4 if several_kinds else 3
    caption = (
        "The columns before the numbers are the settings that differ between the runs. Pareto: "
        "no other run has more goodput for less cost (where no cost is known: more answers "
        "and a lower TTFT). One run each: only more runs can show whether a "
        "difference is more than noise."
    )
    if len(varied) > COLUMNS_MAX:
        caption += f" These differ as well: {', '.join(list(varied)[COLUMNS_MAX:])}."
    return PageTable(
        [
            "run",
            "what",
            *(["kind"] if several_kinds else []),
            "",
            *names,
            *(title for _, title, _ in NUMBERS),
        ],
        rows,
        caption=caption,
        left=(*range(1, first), *(first + n for n in words)),
        marked=() if best is None else (best - 1,),
        is_dense=True,
    )
