"""Dashboards and alerts ask for what there is: by the documented table, without a server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.dashboards import (
    BOARDS,
    GRAFANA,
    OF_PROMETHEUS,
    PROMETHEUS,
    PanelQuery,
    alerts,
    board,
    matchers,
    metric_of,
    panel_queries,
    panels,
    selectors,
)

ADDED_BY_THE_PAGE = {"model", "le"}
ADDED_BY_PROMETHEUS = {"instance", "job"}
UNITS = {"percentunit", "s", "short", "reqps", "cps", "bytes", "Bps"}  # of Grafana's own list
COUNTED = re.compile(r"(rate|increase)\(")
QUERIES = panel_queries()
EXPRESSIONS = {query.name: query.expr for query in QUERIES} | alerts()


@pytest.fixture(params=BOARDS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_every_metric_label_and_value_is_in_the_documented_table(expr: str) -> None:
    asked = selectors(expr)
    assert asked
    known = set(ADDED_BY_PROMETHEUS)
    for series, braces in asked:
        if series in OF_PROMETHEUS:
            continue
        metric = metric_of(series)
        values = {label.name: label.values for label in metric.labels}
        known |= values.keys() | ADDED_BY_THE_PAGE
        for label, operator, value in matchers(braces):
            assert label in values.keys() | ADDED_BY_THE_PAGE | ADDED_BY_PROMETHEUS, (series, label)
            if values.get(label):
                chosen = value.split("|") if "~" in operator else [value]
                assert set(chosen) <= set(values[label]), (series, label, value)
    for names in re.findall(r"\b(?:by|on|group_left|ignoring) \(([^)]*)\)", expr):
        assert {name.strip() for name in names.split(",") if name.strip()} <= known, names


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_what_only_grows_is_asked_for_its_rate_and_what_does_not_is_not(expr: str) -> None:
    for found in re.finditer(r"(rate|increase)?\(?(mooncake_\w+)(?:\{[^}]*\})?(\[[^\]]*\])?", expr):
        function, series, window = found.groups()
        grows = metric_of(series).kind != "gauge"
        assert bool(function and window) == grows, found[0]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_a_panel_follows_the_choices_at_the_top(query: PanelQuery) -> None:
    for series, braces in selectors(query.expr):
        assert 'instance=~"$instance"' in braces, series
    assert "$" not in query.filled_in("1m")
    fixed = re.findall(r"\[(\d+\w)", query.expr)
    assert set(fixed) <= {"1h"}, "windows follow the zoom, or are said in the description"


def test_a_board_can_be_imported(path: Path) -> None:
    found = board(path)
    assert found["schemaVersion"] <= 39, "Grafana 10 has to know it"
    assert "id" not in found and "__inputs" not in found, "an import gives it an id of its own"
    assert re.fullmatch(r"[a-z0-9-]{1,40}", found["uid"])
    variables = {each["name"]: each for each in found["templating"]["list"]}
    assert variables.keys() == {"datasource", "instance"}
    assert variables["datasource"]["type"] == "datasource"
    ((series, _),) = selectors(variables["instance"]["definition"])
    assert metric_of(series).kind == "gauge"


def test_boards_have_names_of_their_own_and_their_links_lead_somewhere() -> None:
    found = [board(path) for path in BOARDS]
    assert len(found) == len(
        {each["uid"] for each in found} & {*(f"mooncake-{p.stem}" for p in BOARDS)}
    )
    for each in found:
        for link in each["links"]:
            assert link["url"].removeprefix("/d/") in {other["uid"] for other in found} - {
                each["uid"]
            }


def test_every_panel_says_what_it_shows_in_which_unit(path: Path) -> None:
    found = panels(path)
    assert len({panel["title"] for panel in found}) == len(found)
    for panel in found:
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert panel["description"].endswith("."), title
        assert defaults["unit"] in UNITS, title
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title
        values = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert values[0] is None and values[1:] == sorted(values[1:]), title
        targets = panel["targets"]
        assert targets and len({each["refId"] for each in targets}) == len(targets), title
        legends = {each["legendFormat"] for each in targets}
        assert len(legends) == len(targets) and all(legends), title
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in legends, title


def test_panels_have_an_id_of_their_own_and_do_not_overlap(path: Path) -> None:
    every = board(path)["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: dict[tuple[int, int], str] = {}
    for panel in every:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]


def test_provisioning_and_prometheus_agree_with_each_other_and_the_readme() -> None:
    def loaded(path: Path) -> dict:
        found: dict = yaml.safe_load(path.read_text())
        return found

    (source,) = loaded(GRAFANA / "provisioning/datasources/mooncake.yml")["datasources"]
    (provider,) = loaded(GRAFANA / "provisioning/dashboards/mooncake.yml")["providers"]
    prometheus = loaded(PROMETHEUS / "prometheus.yml")
    readme = (GRAFANA / "README.md").read_text()
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert source["url"].removeprefix("http://") in readme
    assert f"deploy/grafana:{provider['options']['path']}:ro" in readme
    (job,) = prometheus["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}}' in alerts()["MooncakePageDown"]
    assert {path.name for path in BOARDS} <= set(re.findall(r"`([\w.]+)`", readme))


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert rule["annotations"]["description"].rstrip().endswith("."), rule["alert"]


def test_every_alert_fires_in_a_test_of_its_own() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    labels = [
        sample["labels"]
        for test in tests
        for asked in test["promql_expr_test"]
        for sample in asked["exp_samples"]
    ]
    assert set(re.findall(r'alertname="(\w+)"', " ".join(labels))) == alerts().keys()


def test_every_series_of_the_alerts_tests_is_one_of_the_table() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    for series, braces in (
        found
        for test in tests
        for each in test["input_series"]
        for found in selectors(each["series"])
    ):
        if series in OF_PROMETHEUS:
            continue
        metric = metric_of(series)
        values = {label.name: label.values for label in metric.labels}
        for label, _, value in matchers(braces):
            assert label in values.keys() | ADDED_BY_THE_PAGE | ADDED_BY_PROMETHEUS, (series, label)
            assert not values.get(label) or value in values[label], (series, label, value)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian: prometheus) is missing")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "--lint-fatal", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
