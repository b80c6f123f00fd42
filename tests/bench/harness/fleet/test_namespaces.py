"""Hosts on one switch: who reaches whom, with and without faults, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.harness.fleet import Namespaces, why_no_namespaces
from bench.harness.fleet.faults import NamespaceFailed, NetworkFault, run_tool
from bench.harness.fleet.namespaces import FOLDER, remove_leftovers
from tests.bench.harness.fleet.sockets import (
    PORT,
    WAIT_S_MAX,
    arrived,
    datagrams,
    listener,
    socket_on,
)

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces()),
]


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with Namespaces(("a", "b", "c"), links=2) as made:
        yield made


def connects(hosts: Namespaces, host: str, to: str, within_s: float = 0.3) -> bool:
    with socket_on(hosts, host, socket.SOCK_STREAM) as client:
        client.settimeout(within_s)
        try:
            client.connect((to, PORT))
        except OSError:
            return False
        return True


def test_hosts_and_this_process_reach_each_other_but_for_loopback(hosts: Namespaces) -> None:
    with listener(hosts, "b", "0.0.0.0"):
        assert connects(hosts, "a", hosts.address("b"))
        assert connects(hosts, "a", hosts.address("b", "e1"))
        assert connects(hosts, "b", "127.0.0.1")
        assert not connects(hosts, "a", "127.0.0.1")
        with socket.create_connection((hosts.address("b"), PORT), WAIT_S_MAX) as own:
            assert own.getsockname()[0] == hosts.outside


def test_a_cut_keeps_two_hosts_apart_on_all_links_until_it_is_undone(hosts: Namespaces) -> None:
    with listener(hosts, "b", "0.0.0.0"):
        with hosts.cut("a", "b") as fault:
            assert fault.name == "a cut from b"
            assert not connects(hosts, "a", hosts.address("b"))
            assert not connects(hosts, "a", hosts.address("b", "e1"))
            assert connects(hosts, "c", hosts.address("b"))
            with socket.create_connection((hosts.address("b"), PORT), WAIT_S_MAX):
                pass
        assert connects(hosts, "a", hosts.address("b"))


def test_a_cut_of_one_link_leaves_the_other(hosts: Namespaces) -> None:
    with listener(hosts, "b", "0.0.0.0"), hosts.cut("a", link="e1"):
        assert connects(hosts, "a", hosts.address("b"))
        assert not connects(hosts, "a", hosts.address("b", "e1"))


def test_who_is_cut_from_nobody_in_particular_is_cut_from_all(hosts: Namespaces) -> None:
    with listener(hosts, "b", "0.0.0.0"), listener(hosts, "c", "0.0.0.0"), hosts.cut("a"):
        assert not connects(hosts, "a", hosts.address("b"))
        assert not connects(hosts, "a", hosts.address("c"))
        assert connects(hosts, "b", hosts.address("c"))


def test_a_one_way_cut_loses_only_what_the_sender_sends(hosts: Namespaces) -> None:
    with datagrams(hosts, "a") as a, datagrams(hosts, "b") as b, datagrams(hosts, "c") as c:
        with hosts.cut_one_way("a", "b"):
            for _ in range(10):
                a.sendto(b"from a", (hosts.address("b"), PORT))  # a does not notice
            assert arrived(b, b"from c", c, hosts.address("b")) == []
            assert arrived(a, b"from b", b, hosts.address("a")) == []
        assert arrived(b, b"from a again", a, hosts.address("b")) != [b"from a"] * 10


def test_loss_loses_about_the_share_that_it_says(hosts: Namespaces) -> None:
    """Of 2,000 at 30 %, 1,400 arrive with a deviation of 20: ten of them are allowed."""
    with datagrams(hosts, "a") as a, datagrams(hosts, "b") as b:
        b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        for sender, receiver, name in ((a, b, "b"), (b, a, "a")):
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            with hosts.loss("a", 30.0):
                count = 0
                for _ in range(20):  # less at once than a socket buffers
                    for _ in range(100):
                        sender.sendto(b"x", (hosts.address(name), PORT))
                    count += len(arrived(receiver, b"end", sender, hosts.address(name)))
            assert 1_200 < count < 1_600, count


def test_a_rate_holds_back_what_is_sent(hosts: Namespaces) -> None:
    """Half a second's worth and a burst cannot be there at once."""
    with (
        listener(hosts, "b", "0.0.0.0") as server,
        socket_on(hosts, "a", socket.SOCK_STREAM) as client,
        hosts.rate("b", 1_000_000),
    ):
        client.connect((hosts.address("b"), PORT))
        connection, _ = server.accept()
        with connection:
            connection.settimeout(WAIT_S_MAX)
            started_s = time.monotonic()
            connection.sendall(bytes(600_000))
            left = 600_000
            while left:
                left -= len(client.recv(65_536))
            assert time.monotonic() - started_s > 0.4


def test_a_link_that_is_down_keeps_everybody_out_and_comes_back(hosts: Namespaces) -> None:
    with listener(hosts, "b", "0.0.0.0"):
        with hosts.link("b", up=False):
            assert not connects(hosts, "a", hosts.address("b"))
            assert connects(hosts, "a", hosts.address("b", "e1"))
            assert connects(hosts, "b", "127.0.0.1")
        assert connects(hosts, "a", hosts.address("b"), WAIT_S_MAX)


def test_several_faults_hold_at_once_and_each_is_undone_alone(hosts: Namespaces) -> None:
    with listener(hosts, "b", "0.0.0.0"):
        first, second = hosts.cut("a", "b"), hosts.cut("c", "b")
        first.undo()
        first.undo()
        assert connects(hosts, "a", hosts.address("b"))
        assert not connects(hosts, "c", hosts.address("b"))
        second.undo()
        assert connects(hosts, "c", hosts.address("b"))


def test_a_fault_that_cannot_be_made_leaves_nothing_of_itself(hosts: Namespaces) -> None:
    name = hosts.name("a")
    with pytest.raises(NamespaceFailed, match="no_such_table"):
        NetworkFault(
            "half",
            [(name, "nft add table inet half"), (name, "nft delete table no_such_table")],
            [(name, "nft delete table inet half")],
        )
    assert "half" not in run_tool("ip", "netns", "exec", name, "nft", "list", "ruleset")


def test_two_sets_of_hosts_live_beside_each_other(hosts: Namespaces) -> None:
    with Namespaces(("a", "b")) as others, listener(others, "b", "0.0.0.0"):
        assert others.address("a") != hosts.address("a")
        assert connects(others, "a", others.address("b"))
        assert not connects(hosts, "a", others.address("b"))
        assert remove_leftovers() == []
        assert connects(others, "a", others.address("b"))


def test_nothing_is_left_when_the_block_ends() -> None:
    before = {path.name for path in FOLDER.glob(f"mc-{os.getpid()}*")}
    with Namespaces(("a", "b")) as hosts:
        sleeper = subprocess.Popen(hosts.command("a", ["sleep", "1000"]))
        while not hosts.pids("a"):
            time.sleep(0.01)  # poll
        assert hosts.pids("a") == [sleeper.pid]
    assert sleeper.wait(WAIT_S_MAX) == -signal.SIGKILL
    assert {path.name for path in FOLDER.glob(f"mc-{os.getpid()}*")} == before
    assert hosts.outside not in run_tool("ip", "-4", "addr")
    hosts.close()


KILLED_RUN = """
import subprocess, sys
from bench.harness.fleet import Namespaces
hosts = Namespaces(("a",))
sleeper = subprocess.Popen(hosts.command("a", ["sleep", "1000"]), start_new_session=True)
while not hosts.pids("a"):
    pass
print(sleeper.pid, hosts.name("a"), hosts.outside, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_left_is_removed_by_the_next_one() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert run.stdout is not None
    pid, name, outside = run.stdout.readline().decode().split()
    with Namespaces(("a",)):
        assert (FOLDER / name).exists()  # it lives
    run.kill()
    run.wait()  # its sleeper holds the pipe open
    with Namespaces(("a",)):
        assert not (FOLDER / name).exists()
    until_s = time.monotonic() + WAIT_S_MAX
    while psutil.pid_exists(int(pid)) or outside in run_tool("ip", "-4", "addr"):
        assert time.monotonic() < until_s, f"{pid} or {outside} lives on"
        time.sleep(0.05)  # poll
