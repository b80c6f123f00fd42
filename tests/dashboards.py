"""What deploy/grafana and deploy/prometheus ask: panels, alerts, what is in a query."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backends.metrics.table import METRICS, Metric

ROOT = Path(__file__).resolve().parents[1]
GRAFANA = ROOT / "deploy" / "grafana"
PROMETHEUS = ROOT / "deploy" / "prometheus"
BOARDS = sorted(GRAFANA.glob("*.json"))
OF_PROMETHEUS = {"up"}  # it makes them itself


@dataclass(frozen=True, slots=True)
class PanelQuery:
    board: str
    panel: str
    legend: str
    expr: str

    @property
    def name(self) -> str:
        return f"{self.board}: {self.panel}: {self.legend}"

    def filled_in(self, interval: str) -> str:
        """As Grafana sends it, with "All" chosen."""
        text = self.expr.replace("$__rate_interval", interval).replace("$instance", ".*")
        assert "$" not in text, text
        return text


def board(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels(path: Path) -> list[dict[str, Any]]:
    """Without the headlines of rows."""
    return [panel for panel in board(path)["panels"] if panel["type"] != "row"]


def panel_queries() -> list[PanelQuery]:
    return [
        PanelQuery(path.stem, panel["title"], target["legendFormat"], target["expr"])
        for path in BOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]


def alerts() -> dict[str, str]:
    """The expression of each alert."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def selectors(expr: str) -> list[tuple[str, str]]:
    """(name of a series, what is between its braces)."""
    return re.findall(r"\b(mooncake_\w+|nv_\w+|up)\b(?:\{([^}]*)\})?", expr)


def matchers(braces: str) -> list[tuple[str, str, str]]:
    """(label, operator, value)."""
    found = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', braces)
    rest = re.sub(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', "", braces)
    assert not rest.strip(" ,"), f"not understood: {rest!r}"
    return found


def metric_of(series: str) -> Metric:
    """KeyError for what the table does not have, or has as another kind."""
    base = re.sub(r"_(bucket|sum|count)$", "", series)
    metric = METRICS[series] if series in METRICS else METRICS[base]
    if (series != metric.name) != (metric.kind == "histogram"):
        raise KeyError(f"{series} is no series of the {metric.kind} {metric.name}")
    return metric
