"""What Prometheus gets: every number of the directory and of a reader, from real processes too."""

from __future__ import annotations

import dataclasses
import socket
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from mooncake_store.client.client import StoreClient
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.metrics import DirectoryCollector, directory_families
from mooncake_store.node.metrics import ReaderCollector, node_families
from mooncake_store.process.metrics_page import MetricsPage, PortTaken
from mooncake_store.records.status import DirectoryStats
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.wire.node_protocol import NodeStats
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put
from tests.mooncake_store.processes import DirectoryProcess, SiteProcesses

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(families: Iterable[Metric]) -> Samples:
    found = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is shown twice"
            found[key] = sample.value
    return found


def scraped(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return samples(text_string_to_metric_families(answer.read().decode()))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def value(found: Samples, name: str, **labels: str) -> float:
    return found[(name, tuple(sorted(labels.items())))]


def busy_stats() -> DirectoryStats:
    """Of a directory where something of everything has happened."""
    directory = directory_with("s0", "s1", slots=4)
    put(directory, chain(4, "a"))
    put(directory, chain(2, "b"))  # evicts two
    put(directory, chain(3, "c"), node_id="s1", is_released=False)
    directory.allocate("s1", chain(1, "d"), "writer-2", 10.0, False, 0.0)
    directory.lookup(chain(9, "b"), "reader", 10.0, now_s=0.0)
    directory.drop_copy(chain(1, "c")[0], "s1", 1, 0.0)
    return directory.stats(0.0)


def test_every_number_of_the_directory_is_shown() -> None:
    stats = busy_stats()
    numbers = {name: i + 1_000 for i, name in enumerate(NUMBERS)}
    marked = dataclasses.replace(stats, **{**numbers, "hit_ssd_blocks": 3, "hit_blocks": 10})
    shown = set(samples(directory_families(marked)).values())
    missing = [
        name
        for name, number in numbers.items()
        if number not in shown
        and name not in ("hit_blocks", "lookup_blocks", "hit_ssd_blocks", "used_bytes")
    ]
    assert not missing, f"the page shows nothing of {missing}"


NUMBERS = [field.name for field in dataclasses.fields(DirectoryStats) if field.type == "int"]


def test_a_directory_shows_where_it_is_silent_beside_its_numbers() -> None:
    collector = DirectoryCollector()
    assert samples(collector.collect()) == {}
    collector.update(stats := busy_stats(), silent_addresses=2)
    found = samples(collector.collect())
    assert value(found, "mooncake_directory_silent_addresses") == 2
    assert samples(directory_families(stats)).items() <= found.items()


def test_hits_misses_and_occupation_add_up() -> None:
    stats = busy_stats()
    found = samples(directory_families(stats))
    by_result = {
        result: value(found, "mooncake_directory_lookup_blocks_total", result=result)
        for result in ("dram", "ssd", "miss")
    }
    assert by_result == {"dram": 2, "ssd": 0, "miss": stats.lookup_blocks - 2}
    assert value(found, "mooncake_directory_evictions_total") == 2
    for node in stats.nodes:
        who = {"node_id": node.node_id, "tier": "dram"}
        states = {
            state: value(found, "mooncake_directory_holder_blocks", state=state, **who)
            for state in ("writing", "idle", "leased")
        }
        assert sum(states.values()) == node.ready_blocks + node.writing_blocks
        assert value(found, "mooncake_directory_holder_used_bytes", **who) == (
            (node.ready_blocks + node.writing_blocks) * BLOCK_BYTES
        )
        assert value(found, "mooncake_directory_holder_bytes_max", **who) == node.segment_bytes


@pytest.mark.servers
def test_a_directory_process_shows_what_it_says_of_itself(tmp_path: Path) -> None:
    port = free_port()
    with (
        DirectoryProcess(tmp_path, "--metrics-port", str(port)) as directory,
        DirectoryClient(directory.address) as client,
    ):
        client.register_node(node_info())
        client.attach("s0", "print", BLOCK_BYTES)
        given = client.allocate("s0", chain(3), "writer", 60.0)
        rows = [
            (key, slot.slot, slot.generation, 7)
            for key, slot in zip(chain(3), given.slots, strict=True)
            if slot
        ]
        assert client.commit("s0", rows, "writer", 60.0) == [True] * 3
        client.lookup([*chain(3), *chain(1, "z")], "reader", 60.0)
        wanted = samples(directory_families(client.stats()))
        until_s = time.monotonic() + 20.0
        while True:  # it shows the numbers of the last full second
            found = scraped(port)
            if all(found.get(key) == number for key, number in wanted.items()):
                break
            assert time.monotonic() < until_s, {
                key: (number, found.get(key))
                for key, number in wanted.items()
                if found.get(key) != number
            }
            time.sleep(0.05)  # poll
        count = "mooncake_directory_request_seconds_count"
        assert value(found, count, verb="commit") == value(found, count, verb="lookup") == 1
        taken = DirectoryProcess.__new__(DirectoryProcess)
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(AssertionError, match="the process said ''"):
            DirectoryProcess.__init__(taken, other, "--metrics-port", str(port))
        assert taken.process.wait(timeout=20) == 1


@pytest.mark.servers
@pytest.mark.parametrize(
    ("arguments", "address"),
    [((), "127.0.0.1"), (("--metrics-address", "0.0.0.0"), "0.0.0.0")],
    ids=["unless told", "otherwise"],
)
def test_metrics_listen_on_loopback(
    tmp_path: Path, arguments: tuple[str, ...], address: str
) -> None:
    port = free_port()
    with DirectoryProcess(tmp_path, "--metrics-port", str(port), *arguments) as directory:
        sockets = psutil.Process(directory.process.pid).net_connections("tcp")
        assert {s.laddr.ip for s in sockets if s.laddr.port == port} == {address}


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    page = MetricsPage(0, [], host="127.0.0.1")
    try:
        with pytest.raises(PortTaken, match="choose another --metrics-port"):
            MetricsPage(page.port, [], host="127.0.0.1")
    finally:
        page.close()
        page.close()


def test_every_number_of_a_node_is_shown() -> None:
    names = [name for name in NodeStats.__struct_fields__ if name not in TEXTS]
    numbers = {name: float(i + 1) for i, name in enumerate(names)}
    stats = NodeStats(node_id="s0", incarnation="n", segment_pages="4 KiB", ssd="open", **numbers)
    shown = samples(node_families(stats))
    assert set(shown.values()) - {1.0} >= set(numbers.values()) - {numbers["unit_bytes"], 1.0}
    assert any(("ssd", "open") in labels for _, labels in shown)


TEXTS = ("node_id", "incarnation", "segment_pages", "ssd")


def test_a_reader_shows_bytes_by_transport_and_by_path() -> None:
    directory = InProcessDirectory()
    far = dataclasses.replace(node_info("far"), data_address="203.0.113.1:1")
    directory.register_node(far)
    directory.register_node(node_info("unreachable"))
    nodes = KnownNodes(directory, "own", "tcp")  # type: ignore[arg-type]
    nodes.bytes_per_s = {"far": 2e9}
    with nodes.traffic.moving("far", 4096):
        pass
    page = MetricsPage(0, [ReaderCollector(lambda: nodes)], host="127.0.0.1")
    try:
        found = scraped(page.port)
    finally:
        page.close()
        nodes.close()
    path = {"node_id": "far", "transport": "tcp", "distance": "other"}
    assert value(found, "mooncake_reader_path_bytes_total", **path) == 4096
    assert value(found, "mooncake_reader_path_bytes_per_second", **path) == 2e9
    assert value(found, "mooncake_reader_bytes_total", transport="tcp", direction="read") == 0
    assert not any(("node_id", "unreachable") in labels for _, labels in found)


@pytest.mark.servers
def test_nodes_show_who_read_from_them_and_what_they_pulled(tmp_path: Path) -> None:
    ports = {"s0": free_port(), "s1": free_port()}
    site = SiteProcesses(tmp_path)
    try:
        for node_id, port in ports.items():
            site.node(node_id, 8, "--data", "127.0.0.1:0", "--metrics-port", str(port))
        keys, size = chain(4), 64 * 1024
        with StoreClient(site.address, "s0", transports="tcp") as client:
            assert client.put(keys, [np.full(size, 7, np.uint8)] * 4) == [True] * 4
            assert all(found is not None for found in client.get(keys))
            assert client.change_replica(keys, ["s1"]) == [True] * 4
        found = {node_id: scraped(port) for node_id, port in ports.items()}
    finally:
        site.close()
    served = "mooncake_node_served_bytes_total"
    assert value(found["s0"], served, transport="tcp", direction="write") >= 4 * size
    assert value(found["s0"], served, transport="tcp", direction="read") >= 4 * size
    assert value(found["s1"], "mooncake_node_fetched_blocks_total") == 4
    pulled = {
        name: value(found["s1"], "mooncake_reader_bytes_total", transport=name, direction="read")
        for name in ("nixl", "mapped", "tcp")
        if ("mooncake_reader_bytes_total", (("direction", "read"), ("transport", name)))
        in found["s1"]
    }
    assert sum(pulled.values()) == 4 * size
    [path] = [
        key
        for key in found["s1"]
        if key[0] == "mooncake_reader_path_bytes_total" and ("node_id", "s0") in key[1]
    ]
    assert ("distance", "same_host") in path[1] and found["s1"][path] == 4 * size
    count = "mooncake_node_request_seconds_count"
    assert value(found["s1"], count, verb="fetch") >= 1
