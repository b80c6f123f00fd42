"""Medians and ranges of the rounds, and the targets.

Pure. Not here: the page and the picture (page.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from bench.headline.goodput import FIXED, PAPER, IdleTimes, numbers
from bench.headline.measure import CELLS, CONVERSATION, HEAVY, LIGHT, SYNTHETIC
from bench.headline.resume import MeasuredCell
from bench.headline.systems import SYSTEMS
from loadtest.harness.result import Cell, Target

OURS = "mooncake"
RANGED = ("goodput_fixed_per_s", "goodput_paper_per_s")
OVER_VLLM, OVER_OTHERS = 1.75, 1.3
LIGHT_GOODPUT, LIGHT_TTFT, LIGHT_ITL = 0.98, 1.3, 0.5
Row = Mapping[str, Cell]


def summary_rows(cells: Sequence[MeasuredCell], idle: IdleTimes | None) -> list[dict[str, Cell]]:
    """One row for each system, trace and load: medians over the rounds, ranges of the goodputs.

    A failed system has one row with `why`."""
    groups: dict[tuple[str, str, float], list[MeasuredCell]] = defaultdict(list)
    for cell in cells:
        groups[cell.key.system, cell.key.trace, cell.key.load].append(cell)
    found = []
    for system in SYSTEMS.values():
        for trace, load in CELLS:
            group = groups.get((system, trace, load))
            if group:
                found.append(_row(group, idle))
    return found


def round_rows(cells: Sequence[MeasuredCell]) -> list[dict[str, Cell]]:
    """The seconds of each start and the load average beside each system's round."""
    groups: dict[tuple[int, str], list[MeasuredCell]] = defaultdict(list)
    for cell in cells:
        if not cell.why:
            groups[cell.key.round, cell.key.system].append(cell)
    return [
        {
            "round": number,
            "started": system,
            "start_s": group[0].start_s,
            "load_average_before": round(min(cell.load_before for cell in group), 2),
            "load_average_after": round(max(cell.load_after for cell in group), 2),
        }
        for (number, system), group in groups.items()
    ]


def headline_targets(rows: Sequence[Row]) -> list[Target]:
    """The promised ratios; a value that needs an unmeasured row is null with the reason."""
    found = []
    others = [system for system in SYSTEMS.values() if system != OURS]
    for trace in (CONVERSATION, SYNTHETIC):
        for kind in (FIXED, PAPER):
            column = f"goodput_{kind}_per_s"
            ours, floor = _value(rows, OURS, trace, HEAVY, column), _one_request(rows, trace)
            vllm = _value(rows, "vllm", trace, HEAVY, column)
            known = {
                system: value
                for system in others
                if (value := _value(rows, system, trace, HEAVY, column)) is not None
            }
            best = max(known, key=lambda system: known[system], default=None)
            if not {"vllm-tuned", "vllm-two"} <= known.keys():
                best = None  # nothing is known of the best of them
            name = f"{kind}_{trace}_{HEAVY:g}_over"
            found.append(_ratio(f"{name}_vllm", ours, vllm, ">=", OVER_VLLM, "vllm", floor))
            theirs = known[best] if best else None
            found.append(_ratio(f"{name}_best", ours, theirs, ">=", OVER_OTHERS, best or "", floor))
    at = (CONVERSATION, LIGHT)
    for kind in (FIXED, PAPER):
        ours = _value(rows, OURS, *at, f"goodput_{kind}_per_s")
        offered = _value(rows, OURS, *at, "offered_per_s")
        name = f"{kind}_{LIGHT:g}_of_offered"
        found.append(_ratio(name, ours, offered, ">=", LIGHT_GOODPUT, "the offered rate"))
    ttfts = {
        system: value
        for system in ("vllm", "vllm-tuned")
        if (value := _value(rows, system, *at, "ttft_mean_ms")) is not None
    }
    better = min(ttfts, key=lambda system: ttfts[system], default=None)
    theirs = ttfts[better] if better else None
    ours = _value(rows, OURS, *at, "ttft_mean_ms")
    found.append(_ratio(f"ttft_mean_{LIGHT:g}", ours, theirs, "<=", LIGHT_TTFT, better or ""))
    ours, theirs = (_value(rows, name, *at, "itl_p99_ms") for name in (OURS, "vllm-tuned"))
    found.append(_ratio(f"itl_p99_{LIGHT:g}", ours, theirs, "<=", LIGHT_ITL, "vllm-tuned"))
    return found


def _row(group: Sequence[MeasuredCell], idle: IdleTimes | None) -> dict[str, Cell]:
    key = group[0].key
    row: dict[str, Cell] = {"system": key.system, "trace": key.trace, "load": key.load}
    ran = [numbers(cell.details, cell.rate_per_s, idle) for cell in group if not cell.why]
    if not ran:
        row |= {"offered_per_s": round(group[0].rate_per_s, 4), "rounds": 0}
        return row | {"why": group[0].why.partition(";")[0]}  # the rest names files
    for column in ran[0]:
        values = [float(one[column]) for one in ran if one[column] is not None]  # type: ignore[arg-type]
        is_count = isinstance(ran[0][column], int)
        row[column] = round(median(values), None if is_count else 4) if values else None
        if column in RANGED and values:
            row[f"{column}_min"], row[f"{column}_max"] = min(values), max(values)
    return row | {"rounds": len(ran)}


def _value(rows: Sequence[Row], system: str, trace: str, load: float, column: str) -> float | None:
    for row in rows:
        if (row.get("system"), row.get("trace"), row.get("load")) == (system, trace, load):
            value = row.get(column)
            return None if value is None else float(value)
    return None


def _one_request(rows: Sequence[Row], trace: str) -> float:
    """The goodput of one good request at the heavy load: the least that a ratio is taken of."""
    offered = _value(rows, OURS, trace, HEAVY, "offered_per_s")
    requests = _value(rows, OURS, trace, HEAVY, "requests")
    return offered / requests if offered and requests else 0.0


def _ratio(
    name: str,
    ours: float | None,
    theirs: float | None,
    op: str,
    goal: float,
    whose: str,
    floor: float = 0.0,
) -> Target:
    if ours is None or theirs is None:
        missing = OURS if ours is None else whose or "another system"
        return Target(name, None, op, goal, f"{missing} was not measured there")
    why = f"over {whose}"
    if theirs < floor:
        theirs, why = floor, f"{why}, counted as one good request"
    if theirs <= 0:
        return Target(name, None, op, goal, f"{whose} has 0")
    return Target(name, round(ours / theirs, 3), op, goal, why)
