"""Every query of every panel and alert returns numbers from a running system.

A real Triton under a load that rejects, makes a prefix hot until it has another copy, and asks for
more blocks than DRAM holds, so that the SSD tier spills and restores; Debian's Prometheus, with the
configuration and the rules of deploy/prometheus, scrapes it meanwhile.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as triton

from loadtest.harness.server import free_addresses
from tests.dashboards import OF_PROMETHEUS, PanelQuery, alerts, panel_queries, selectors
from tests.e2e.causes import B, ask, prompt
from tests.e2e.prometheus import BINARY, PrometheusApi, scraping
from tests.e2e.server import Server, running, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.skipif(not BINARY, reason="prometheus (Debian's package) is not installed"),
]
REQUESTS_MAX = 8
HOT_HITS_PER_S = 0.2  # a fifth of the default: the prefix stays hot until all is asked
PROMPT_BLOCKS = 12
PROMPTS = 20  # 20 x 12 blocks of 128 KiB on two nodes of 12 MiB: more than DRAM holds
WINDOW = "10m"  # all of the load
QUERIES = panel_queries()
# Shown only of workers to which there is no way, and where there are network cards.
NOT_HERE = {"mooncake_worker_unreached", "mooncake_nic_resting_paths"}
# A series of a status begins with the first such answer, and none of these went wrong.
BEGINS_WHEN_IT_HAPPENS = {"mooncake_gateway_requests_total"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("dashboards")
    parameters = {"requests_max": str(REQUESTS_MAX)}
    gateway = ["--openai-port", free_addresses().http.rpartition(":")[2]]
    tiers = ["--store-bytes", "12M", "--ssd-bytes", "256M", "--ssd-path", str(folder / "ssd")]
    yield from running(folder, state_dir, parameters, [*gateway, *tiers], prepare=make_heat_last)


def make_heat_last(repository: Path) -> None:
    with (repository / "conductor" / "config.pbtxt").open("a") as config:
        value = f'{{ string_value: "{HOT_HITS_PER_S}" }}'
        config.write(f'parameters {{ key: "hot_hits_per_s" value {value} }}\n')


@pytest.fixture(scope="module")
def scraper(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusApi]:
    yield from scraping(server, tmp_path_factory.mktemp("prometheus"))


@pytest.fixture(scope="module")
def loaded(server: Server, scraper: PrometheusApi) -> PrometheusApi:
    """After the load, when all of it has been scraped."""
    ids = prompt(3, 16 * B + 5)
    ask(server, ids, prefill=0)
    assert ask(server, ids, prefill=1).decision["fetched_blocks"] > 0
    ask_the_gateway(server)
    spill_and_restore(server)
    make_hot(server)  # last, or its blocks would have given way again
    be_rejected(server)
    wait_until(server.is_idle, "pages, slots and leases to be free")
    page = {
        name: server.metric(name)
        for name in (
            "mooncake_requests_total",
            "mooncake_output_tokens_total",
            "mooncake_store_restored_blocks_total",
            "mooncake_store_spills_total",
            "mooncake_rejections_total",
        )
    }
    wait_until(
        lambda: all(scraper.value(name) >= value for name, value in page.items()),
        "Prometheus to have seen all of it",
    )
    return scraper


def ask_the_gateway(server: Server) -> None:
    """One answer and one refusal, at the port that it was started with."""
    arguments = psutil.Process(server.process.pid).cmdline()
    url = f"http://127.0.0.1:{arguments[arguments.index('--openai-port') + 1]}"

    def post(body: dict[str, Any]) -> int:
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60.0) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0  # it does not listen yet

    body = {"prompt": "It was", "max_tokens": 4}
    wait_until(lambda: post(body | {"n": 0}) == 400, "the gateway to refuse no answers")
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60.0) as answer:
        model = json.load(answer)["data"][0]["id"]
    wait_until(lambda: post(body | {"model": model}) == 200, "the gateway to answer")


def make_hot(server: Server) -> None:
    """All at one worker: where routing may spread them, each node has the blocks soon."""
    ids = prompt(4, 4 * B + 5)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ask(server, ids, tokens=1), range(160)))
    wait_until(
        lambda: server.metric("mooncake_replicated_blocks_total") > 0,
        "a hot prefix to get another copy",
    )
    wait_until(
        lambda: server.metric("mooncake_hot_block_copies") > server.metric("mooncake_hot_blocks"),
        "the copy to be there",
    )


def spill_and_restore(server: Server) -> None:
    def ask_all() -> float:
        for number in range(PROMPTS):
            ask(server, prompt(40 + number, PROMPT_BLOCKS * B + 5), number % 2, number % 2)
        return server.metric("mooncake_store_restored_blocks_total")

    wait_until(ask_all, "blocks to be restored from SSD", 60.0)
    wait_until(
        lambda: server.metric("mooncake_store_spills_total") > 0,
        "the directory to tell what was spilled",
    )
    wait_until(
        lambda: server.metric("mooncake_store_lookup_blocks_total", result="ssd"),
        "the directory's counts to be published",
    )


def be_rejected(server: Server) -> None:
    """Streams until one finds no room, in the frontend or at the decode workers."""
    streams = []
    try:
        for _ in range(REQUESTS_MAX + 1):
            streams.append(
                server.stream(text_input="It was", max_tokens=2000, end_id=-1, stream=True)
            )
            try:
                streams[-1].next()
            except triton.InferenceServerException as error:
                assert "rejected kind=" in str(error)
                return
    finally:
        for stream in streams:
            stream.leave()
    raise AssertionError(f"{len(streams)} requests in flight, and none was rejected")


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_every_query_of_every_panel_returns_numbers(
    loaded: PrometheusApi, query: PanelQuery
) -> None:
    found = loaded.query(query.filled_in(WINDOW))
    assert found, "no data"
    assert all(math.isfinite(sample.value) for sample in found), found
    for label in re.findall(r"{{(\w+)}}", query.legend):
        assert all(sample.labels.get(label) for sample in found), (label, found)


@pytest.mark.parametrize(
    ("panel", "legend", "least", "most"),
    [
        ("Goodput", "within both limits", 0.5, 1.0),
        ("Time to first token", "limit", 30.0, 30.0),
        ("Time between tokens", "limit", 1.0, 1.0),
        ("Rejections by reason", "{{reason}}", 1e-6, 10.0),
        ("Workers", "{{role}}", 4.0, 4.0),
        ("Predicted over actual", "TTFT", 1e-3, 1e3),
        ("Predicted over actual", "TBT", 1e-3, 1e3),
        ("Copies of a hot block", "at least {{heat}} x", 1.0, 8.0),
        ("Copies made", "blocks", 1e-6, 1e3),
        ("Evictions", "{{node}}", 1e-6, 1e3),
        ("Found on SSD only", "SSD", 1e-6, 1.0),
        ("Spilled and restored", "spilled", 1e-6, 1e3),
        ("Spilled and restored", "restored", 1e-6, 1e3),
        ("SSD taken", "{{node}}", 1e-6, 2.0),
        ("Hit rate", "not computed", 1e-6, 1.0),
        ("Looked-up blocks by tier", "{{result}}", 1.0, 1.0),
        ("Fetches and failures", "fetches", 1e-6, 10.0),
    ],
)
def test_panels_show_what_happened(
    loaded: PrometheusApi, panel: str, legend: str, least: float, most: float
) -> None:
    """The sum over a query's series, between these."""
    (query,) = [each for each in QUERIES if (each.panel, each.legend) == (panel, legend)]
    value = loaded.value(query.filled_in(WINDOW))
    assert least * (1 - 1e-9) <= value <= most * (1 + 1e-9), value


@pytest.mark.parametrize("name", alerts())
def test_the_metrics_of_every_alert_are_there(loaded: PrometheusApi, name: str) -> None:
    for series, braces in selectors(alerts()[name]):
        if series not in NOT_HERE | OF_PROMETHEUS:
            asked = "" if series in BEGINS_WHEN_IT_HAPPENS else braces
            assert loaded.query(f"{series}{{{asked}}}"), (series, asked)
    loaded.query(alerts()[name])


def test_prometheus_has_evaluated_every_alert(loaded: PrometheusApi) -> None:
    def rules_of(health: str) -> set[str]:
        return {name for name, rule in loaded.rules().items() if rule["health"] == health}

    wait_until(lambda: rules_of("ok") | rules_of("err") == alerts().keys(), "an evaluation of all")
    assert rules_of("ok") == alerts().keys(), loaded.rules()
