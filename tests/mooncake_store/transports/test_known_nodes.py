"""Which transport reaches which node in each mode, and what happens where NIXL cannot be used."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl
from mooncake_store.transports.nixl_transport import NixlTransport
from mooncake_store.transports.paths.path_cost import Distance
from mooncake_store.transports.rates import CMA_OVER_TCP_MIN, Probe
from mooncake_store.transports.tcp_transport import TcpTransport
from mooncake_store.transports.transport import Transport
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.makers import node_info
from tests.mooncake_store.targets import ROOT, TARGET_BYTES, Target, TargetPool

HERE = host_id("/dev/shm/x")
OWN = replace(node_info("own"), host_id=HERE, data_address="h:1", rack="r1")
NODES = [
    OWN,
    replace(OWN, node_id="neighbour"),
    replace(OWN, node_id="bare", agent_name="", data_address=""),
    replace(OWN, node_id="far", host_id="elsewhere"),
    replace(OWN, node_id="far-tcp", host_id="elsewhere", agent_name="", rack="r2"),
    replace(OWN, node_id="far-bare", host_id="elsewhere", agent_name="", data_address=""),
    replace(OWN, node_id="own/ssd", tier="ssd"),
]
TABLE = {
    "auto": ["mapped", "nixl", "mapped", "nixl", "tcp", None, None],
    "mapped": ["mapped", "mapped", "mapped", None, None, None, None],
    "nixl": ["nixl", "nixl", None, "nixl", None, None, None],
    "tcp": ["tcp", "tcp", None, "tcp", "tcp", None, None],
    "auto, no NIXL": ["mapped", "mapped", "mapped", "tcp", "tcp", None, None],
}


@pytest.fixture
def directory() -> InProcessDirectory:
    made = InProcessDirectory()
    for info in NODES:
        made.register_node(info)
    return made


def known(directory: InProcessDirectory, mode: str, own_id: str = "own") -> KnownNodes:
    if mode in ("auto", "nixl"):
        try:
            load_nixl()
        except NixlUnavailable as error:
            pytest.skip(str(error))
    return KnownNodes(directory, own_id, mode)  # type: ignore[arg-type]


def refuse() -> None:
    raise NixlUnavailable("cannot import nixl")


@pytest.mark.parametrize("mode", TABLE)
def test_the_transport_of_each_pair_of_nodes(
    directory: InProcessDirectory, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "auto, no NIXL":
        monkeypatch.setattr("mooncake_store.transports.known_nodes.NixlTransport", refuse)
    nodes = known(directory, mode.partition(",")[0])
    chosen = [nodes.transport(info) for info in NODES]
    assert [transport and transport.name for transport in chosen] == TABLE[mode]
    nodes.close()


def test_without_nixl_auto_says_so_once_and_nixl_refuses(
    directory: InProcessDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mooncake_store.transports.known_nodes.NixlTransport", refuse)
    nodes = known(directory, "auto")
    for info in NODES:
        nodes.transport(info)
    nodes.close()
    assert [record.message for record in caplog.records] == [
        "continuing without NIXL, by plain TCP to other hosts: cannot import nixl"
    ]
    with pytest.raises(NixlUnavailable):
        KnownNodes(directory, "own", "nixl")  # type: ignore[arg-type]


def test_a_client_without_a_node_of_its_own_still_knows_its_host(
    directory: InProcessDirectory,
) -> None:
    nodes = known(directory, "mapped", own_id="")
    assert nodes.transport(OWN) is nodes.mapped
    assert nodes.transport(NODES[3]) is None
    assert {name: route.distance for name, route in nodes.routes().items()} == {
        "own": Distance.SAME_HOST,
        "neighbour": Distance.SAME_HOST,
        "bare": Distance.SAME_HOST,
        "own/ssd": Distance.SAME_HOST,
    }
    nodes.close()


def test_routes_leave_out_what_cannot_be_read_and_what_failed_a_moment_ago(
    directory: InProcessDirectory,
) -> None:
    nodes = known(directory, "tcp")
    nodes.bytes_per_s = {"far": 3e9}
    near, far = (Copy(name, 0, 1, 0, 4096) for name in ("neighbour", "far"))
    with nodes.traffic.moving("far", 1000):
        routes = nodes.routes()
    assert set(routes) == {"own", "neighbour", "far", "far-tcp", "own/ssd"}
    assert routes["far"].distance is Distance.SAME_RACK
    assert routes["far-tcp"].distance is Distance.OTHER
    assert (routes["far"].bytes_per_s, routes["far"].under_way_bytes) == (3e9, 1000)
    assert nodes.choose([[far, near]]) == [near]
    nodes.mark_bad(NODES[1])
    assert nodes.choose([[far, near], [near]]) == [far, None]
    nodes.close()


# ---- nodes that go away


def leave(directory: InProcessDirectory, *names: str) -> None:
    for info in directory.nodes():
        if info.node_id in names:
            directory.deregister_node(info.node_id, info.incarnation)


def test_what_leads_to_a_node_is_let_go_when_it_is_gone_for_long(
    directory: InProcessDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go: list[str] = []
    busy = {"far-tcp"}

    def disconnect(_: TcpTransport, node_id: str) -> bool:
        let_go.append(node_id)
        return node_id not in busy

    monkeypatch.setattr(TcpTransport, "disconnect", disconnect)
    nodes = known(directory, "tcp")
    leave(directory, "far", "far-tcp", "neighbour")
    nodes.refresh()
    nodes.refresh()
    assert let_go == [], "it may be back in a moment"
    directory.register_node(NODES[1])
    monkeypatch.setattr("mooncake_store.transports.known_nodes.GONE_S", 0.0)
    nodes.refresh()
    assert sorted(let_go) == ["far", "far-tcp"], "the neighbour is back"
    nodes.refresh()
    assert sorted(let_go) == ["far", "far-tcp", "far-tcp"], "once more what was busy"
    busy.clear()
    for _ in range(3):
        nodes.refresh()
    assert let_go.count("far-tcp") == 3 and let_go.count("far") == 1
    leave(directory, "neighbour")
    for _ in range(3):
        nodes.refresh()
    assert let_go.count("neighbour") == 1
    nodes.close()


def test_memory_that_is_mapped_stays_so_while_its_owner_lives(
    directory: InProcessDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be writing there, and its node may only be cut off from the directory."""
    monkeypatch.setattr("mooncake_store.transports.known_nodes.GONE_S", 0.0)
    nodes = known(directory, "tcp")
    monkeypatch.setattr(nodes.mapped, "disconnect", lambda _: pytest.fail("unmapped"))
    leave(directory, "own")
    for _ in range(3):
        nodes.refresh()
    monkeypatch.undo()
    nodes.close()


def test_a_nixl_lane_that_is_busy_is_disconnected_another_time(
    directory: InProcessDirectory,
) -> None:
    nodes = known(directory, "nixl")
    transport = nodes.nixl
    assert isinstance(transport, NixlTransport)
    transport.make_lanes(2)
    [first, *_] = transport._lanes
    with first.lock:
        assert not transport.disconnect("far")
    assert transport.disconnect("far")
    nodes.close()


# ---- in a process whose NIXL cannot start

WITHOUT = """
import json, logging, os, sys
import numpy as np
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.rates import CMA_OVER_TCP_MIN, Probe
from mooncake_store.transports.transport import ByteSpan
from tests.mooncake_store.in_process import InProcessDirectory
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
values = json.loads(sys.stdin.readline())
values["agent_metadata"] = bytes.fromhex(values["agent_metadata"])
info = NodeInfo(**values)
directory = InProcessDirectory()
directory.register_node(info)
nodes = KnownNodes(directory, "", "auto")
buffer = np.zeros(4096, np.uint8)
nodes.register(buffer)
nodes.transport(info).read(info, [ByteSpan(0, 4096)], [(buffer, ByteSpan(0, 4096))], 10.0)
print(sorted(Probe(nodes).rates()), int(buffer.sum()))
"""


@pytest.fixture
def target(targets: TargetPool) -> Iterator[Target]:
    taken = targets.take("t0")
    yield taken
    targets.give_back(taken)


def as_json(info: NodeInfo) -> str:
    values = {name: getattr(info, name) for name in info.__slots__}
    return json.dumps({**values, "agent_metadata": info.agent_metadata.hex()})


def test_a_process_whose_nixl_cannot_start_reads_another_host_by_plain_tcp(target: Target) -> None:
    with Segment.open(target.path) as segment:
        segment.view[:4096] = 1
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=ROOT,
        env={**os.environ, "UCX_TLS": "posix,self"},
        input=as_json(replace(target.info, host_id="elsewhere")) + "\n",
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert "continuing without NIXL" in lines[0] and "UCX_TLS" in lines[0]
    assert lines[1].startswith("node_id=t0 is read by tcp: ")
    assert lines[-1] == "['t0'] 4096"


# ---- the start-up report


class OnThisHost:
    """NIXL to a node that no NIXL of its own reaches: read by plain TCP."""

    name = "nixl"

    def __init__(self, inner: TcpTransport) -> None:
        self.read = inner.read

    def register(self, buffer: np.ndarray) -> None:
        pass

    def reaches(self, node: NodeInfo, is_same_host: bool) -> bool:
        return True


@pytest.mark.parametrize("nixl_over_tcp", [0.9, 1.4, 1.6, 3.9])
def test_nixl_on_this_host_that_is_hardly_faster_than_tcp_is_warned_of_once(
    target: Target,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    nixl_over_tcp: float,
) -> None:
    caplog.set_level(logging.INFO)
    is_warned = nixl_over_tcp < CMA_OVER_TCP_MIN
    read = Probe._measured

    def rated(probe: Probe, info: NodeInfo, transport: Transport) -> tuple[float, float]:
        measured = read(probe, info, transport)  # read, but the machine's speed decides nothing
        assert measured is not None
        return (nixl_over_tcp if transport.name == "nixl" else 1.0) * 1e9, measured[1]

    monkeypatch.setattr(Probe, "_measured", rated)
    directory = InProcessDirectory()
    directory.register_node(target.info)
    nodes = known(directory, "auto", own_id="none")
    real = nodes.nixl
    assert real is not None and target.info.segment_bytes == TARGET_BYTES
    nodes.nixl = OnThisHost(nodes.tcp)  # type: ignore[assignment]
    probe = Probe(nodes)
    assert set(probe.rates()) == set(probe.rates()) == {"t0"}
    [path] = probe.paths()
    assert path.transport == "nixl" and ("hardly faster" in path.warning) == is_warned
    said = [record for record in caplog.records if "t0" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO", "WARNING"][: 1 + is_warned]
    assert ("--pid=host --ipc=host" in said[-1].getMessage()) == is_warned
    real.close()
    nodes.nixl = None
    nodes.close()
