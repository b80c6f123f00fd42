"""The storage node as a process, against the real directory server."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.errors import SsdRefused
from mooncake_store.memory.segment import Segment
from mooncake_store.node import node as node_module
from mooncake_store.node.node import Clients, NodeOptions, StorageNode
from mooncake_store.records.membership import NodeInfo
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.site import PATIENCE_S, SIZE, Site, ready_line
from tests.mooncake_store.targets import ROOT

pytestmark = pytest.mark.servers


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def one(found: list[NodeInfo]) -> bool:
    return len(found) == 1


def test_a_node_registers_serves_and_leaves_nothing_behind(site: Site) -> None:
    site.start_directory()
    process = site.start_node("s0")
    line = ready_line(process)
    [info] = site.nodes(one)
    assert line == f"ready node_id=s0 incarnation={info.incarnation} segment_bytes={SIZE}\n"
    assert info.agent_name == f"s0#{info.incarnation}" and len(info.agent_metadata) > 100
    with Segment.open(info.segment_path, info.segment_bytes) as segment:
        assert segment.is_owner_alive()
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and output == "", "stdout holds the ready line only"
        assert site.client.nodes() == [] and site.segments() == []
        process = site.start_node("s0", "--mapped-only")
        assert ready_line(process).startswith("ready node_id=s0")
        site.nodes(one)


def test_a_directory_that_restarts_gets_its_nodes_back(site: Site) -> None:
    directory = site.start_directory()
    node = site.start_node("s0", "--mapped-only")  # waits for the directory if it must
    ready_line(node)
    [before] = site.nodes(one)
    directory.kill()
    directory.wait()
    site.start_directory()
    assert site.nodes(one) == [before]
    assert node.poll() is None


def test_a_node_that_was_replaced_ends_instead_of_fighting(site: Site) -> None:
    site.start_directory()
    old = site.start_node("s0", "--mapped-only")
    ready_line(old)
    [before] = site.nodes(one)
    new = site.start_node("s0", "--mapped-only", name="other")
    ready_line(new)
    _, said = old.communicate(timeout=PATIENCE_S)
    assert old.returncode == 1 and "newer process" in said
    [info] = site.client.nodes()
    assert info.incarnation != before.incarnation and new.poll() is None
    assert len(site.segments()) == 1


def test_two_nodes_cannot_share_a_segment_path(site: Site) -> None:
    site.start_directory()
    ready_line(site.start_node("s0", "--mapped-only"))
    second = site.start_node("s1", "--mapped-only", name="s0")
    _, said = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 1 and "living process" in said


def test_a_killed_node_can_start_again_at_the_same_path(site: Site) -> None:
    site.start_directory()
    first = site.start_node("s0", "--mapped-only")
    ready_line(first)
    [before] = site.nodes(one)
    first.kill()
    first.wait()
    assert len(site.segments()) == 1  # nobody could unlink it
    ready_line(site.start_node("s0", "--mapped-only"))
    [after] = site.nodes(one)
    assert after.incarnation != before.incarnation and len(site.segments()) == 1


LAUNCHER = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(process.pid, process.stdout.readline(), end="", flush=True)
sys.stdin.read()
"""


def test_a_node_ends_when_its_launcher_dies(site: Site) -> None:
    site.start_directory()
    command = [
        sys.executable,
        "-m",
        "mooncake_store.node",
        "--node-id",
        "s0",
        "--directory",
        site.address,
        "--segment-bytes",
        str(SIZE),
        "--segment-path",
        f"{site.prefix}-s0",
        "--mapped-only",
        "--die-with-parent",
    ]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with launcher:
        assert " ready node_id=s0" in ready_line(launcher)
        site.nodes(one)
        launcher.kill()
    site.nodes(lambda found: found == [])
    until_s = time.monotonic() + PATIENCE_S
    while site.segments():
        assert time.monotonic() < until_s, "the orphan left its segment"
        select.select([], [], [], 0.02)


def test_a_node_without_a_directory_keeps_trying_and_ends_when_told(site: Site) -> None:
    process = site.start_node("s0", "--mapped-only")
    assert process.stderr is not None
    assert any("cannot report: " in line for line in iter(process.stderr.readline, ""))
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and site.segments() == []


def test_a_report_registers_again_under_the_same_incarnation() -> None:
    directory = InProcessDirectory()
    path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
    options = NodeOptions("s0", path, SIZE, is_mapped_only=True)
    clients = Clients(directory, directory, directory)  # type: ignore[arg-type]
    node = StorageNode(options, clients, lambda: None)
    try:
        assert node.report() and node.report()
        assert directory.asked == ["register_node", "adopt", "node_report", "node_report"]
        directory.directory = InProcessDirectory().directory  # it restarted
        assert node.report()
        assert directory.nodes() == [node.info]
        directory.is_down = True
        assert not node.report()
        directory.is_down = False
        assert node.report()
    finally:
        node.close()
        node.close()
    assert directory.nodes() == [] and not Path(path).exists()


def test_a_node_whose_ssd_is_refused_at_a_retry_serves_from_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [OSError("the disk is full"), SsdRefused("a live process has it")]

    def fail(*_: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(node_module, "SsdTier", fail)
    monkeypatch.setattr(node_module, "RETRY_S", 0.0)
    directory = InProcessDirectory()
    path = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
    options = NodeOptions(
        "s0", path, SIZE, is_mapped_only=True, ssd_folder=str(tmp_path), ssd_bytes=SIZE
    )
    clients = Clients(directory, directory, directory)  # type: ignore[arg-type]
    node = StorageNode(options, clients, lambda: None)
    try:
        assert node.report() and not errors, "the retry came"
        assert node.stats().ssd == "not available" and directory.nodes() == [node.info]
    finally:
        node.close()
