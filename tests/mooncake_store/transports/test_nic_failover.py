"""Two hosts with two network cards each, in namespaces of this machine: cards are cut and heal.

Real agents, real links. A link is slowed down, so that a read takes long enough to be cut in its
middle, which the reader itself announces.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.fleet.faults import NetworkFault
from bench.harness.fleet.namespaces import Namespaces, why_no_namespaces
from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl
from mooncake_store.transports.nixl_transport import FROZEN_MAX

MB = 2**20
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.servers
START_S_MAX, ANSWER_S_MAX = 60.0, 60.0
HELD_BYTES_MAX = 64 * MB
SLOW = 11e6  # bytes/s of each link: 48 MB over two of them take as long as a cut may be late
Nics = dict[str, dict[str, int]]
_NUMBERS = itertools.count()


class Spoken:
    """A process that says JSON lines."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log.open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=ROOT,
            env={**os.environ, **environment},
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(5)}: {Path(self.log.name).read_text()[-2000:]}"
        return line

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before it read what was asked
                pipe.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.log.close()


class TwoHosts:
    """A directory and node b0 on host b, clients on host a."""

    def __init__(self, folder: Path, more: dict[str, str], links: int = 2) -> None:
        self.folder, self.more = folder, more
        self._closers: list[Callable[[], None]] = []
        self._faults: list[NetworkFault] = []
        self.network = Namespaces(("a", "b"), links=links)
        self._closers.append(self.network.close)
        self.directory = f"tcp://{self.network.address('b')}:7001"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def start(self, host: str, name: str, *words: str) -> Spoken:
        command = self.network.command(host, [sys.executable, "-m", *words])
        environment = {"MOONCAKE_HOST_IDENTITY": host, "MOONCAKE_INSECURE": "1", **self.more}
        made = Spoken(command, environment, self.folder / f"{name}.log")
        self._closers.append(made.close)
        return made

    def _start(self) -> None:
        directory = self.start(
            "b",
            "directory",
            "mooncake_store.directory",
            "--address",
            self.directory,
            "--events",
            self.directory.replace("7001", "7002"),
        )
        directory.line()
        self.segment = f"/dev/shm/mooncake-test-nics-{os.getpid()}-{next(_NUMBERS)}"
        # A node that must be killed leaves it behind.
        self._closers.append(lambda: Path(self.segment).unlink(missing_ok=True))
        self.node = self.start(
            "b",
            "node",
            "mooncake_store.node",
            "--node-id",
            "b0",
            "--directory",
            self.directory,
            "--segment-bytes",
            str(512 * MB),
            "--segment-path",
            self.segment,
            "--data",
            f"{self.network.address('b')}:7003",
        )
        assert self.node.line().startswith("ready")
        self.client = Client(self)

    def cut(self, link: str, fault: str) -> None:
        """Of host a from host b, by this link, until `undo`."""
        network = self.network
        match fault:
            case "own link":
                self._faults.append(network.link("a", link=link))
            case "their link":
                self._faults.append(network.link("b", link=link))
            case _:
                self._faults.append(network.cut("a", "b", link=link))

    @contextlib.contextmanager
    def slow(self, sender: str = "b") -> Iterator[None]:
        """Links that take some time, so that a transfer can be cut in its middle."""
        with contextlib.ExitStack() as stack:
            for link in self.network.links:
                stack.enter_context(self.network.rate(sender, SLOW, link))
            yield

    def undo(self) -> None:
        while self._faults:
            self._faults.pop().undo()

    def heal(self) -> None:
        """Undo every fault, and wait until every card is in use again, and the directory's
        connection too: what TCP sends once more after a cut may take seconds to go."""
        self.undo()
        self.wait_until(lambda: not any(n["cooling_down"] for n in self.client.nics().values()))
        self.wait_until(lambda: bool(self.client.ask("reaches_directory")["reached"]))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + ANSWER_S_MAX
        while not is_so():
            assert time.monotonic() < until_s, self.client.ask("counters")

    def received_bytes(self, link: str) -> int:
        """By host a."""
        command = ["cat", f"/sys/class/net/{link}/statistics/rx_bytes"]
        return int(subprocess.check_output(self.network.command("a", command)))

    def wait_for_unread_bytes(self, link: str) -> None:
        """That have come to host a over this link, and that nobody reads."""
        own = socket.inet_aton(self.network.address("a", link))[::-1].hex().upper()

        def is_so() -> bool:
            command = self.network.command("a", ["cat", "/proc/net/tcp"])
            rows = [
                line.split() for line in subprocess.check_output(command, text=True).splitlines()
            ]
            return any(
                row[1].startswith(own) and int(row[4].partition(":")[2], 16) > 0 for row in rows[1:]
            )

        self.wait_until(is_so)

    def close(self) -> None:
        self.undo()
        while self._closers:
            self._closers.pop()()


class Client:
    """On host a."""

    def __init__(self, hosts: TwoHosts) -> None:
        module = "tests.mooncake_store.transports.nic_client"
        self.spoken = hosts.start("a", "client", module, hosts.directory)
        assert self.answer() == {"ready": True}

    def answer(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.spoken.line())
        return said

    def ask(
        self, verb: str, under_way: Callable[[], object] = lambda: None, **fields: object
    ) -> dict[str, Any]:
        """The answer; `under_way` is called once bytes have come over every card."""
        assert self.spoken.process.stdin is not None
        self.spoken.process.stdin.write(json.dumps({"verb": verb, **fields}) + "\n")
        self.spoken.process.stdin.flush()
        answer = self.answer()
        if "under_way" in answer:
            under_way()
            answer = self.answer()
        return answer

    def nics(self) -> Nics:
        found: Nics = self.ask("counters")["nics"]
        return found


def two_hosts(folder: Path, more: dict[str, str], links: int = 2) -> TwoHosts:
    if why := why_no_namespaces():
        pytest.skip(why)
    try:
        load_nixl()
    except NixlUnavailable as error:
        pytest.skip(str(error))
    return TwoHosts(folder, more, links)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    made = two_hosts(tmp_path_factory.mktemp("hosts"), {})
    yield made
    made.close()


@pytest.fixture
def hosts(shared: TwoHosts) -> Iterator[TwoHosts]:
    """With all links up, every card in use, and the directory in reach."""
    yield shared
    shared.heal()


@pytest.fixture
def stored(hosts: TwoHosts) -> list[int]:
    """Numbers of blocks of a megabyte that are on the node."""
    numbers = list(range(48))
    said = hosts.client.ask("put", numbers=numbers, size_bytes=MB, deadline_s=20.0)
    assert all(said["stored"])
    return numbers


def moved_by(after: Nics, before: Nics, direction: str) -> dict[str, int]:
    name = f"{direction}_bytes"
    return {nic: after[nic][name] - before[nic][name] for nic in after}


@pytest.mark.parametrize("fault", ["own link", "their link", "silent loss"])
def test_a_card_that_is_cut_in_the_middle_of_a_read_costs_a_second_and_comes_back(
    hosts: TwoHosts, stored: list[int], fault: str
) -> None:
    client, deadline_s = hosts.client, 20.0
    read = {"numbers": stored, "size_bytes": MB, "deadline_s": deadline_s}
    before = client.nics()
    with hosts.slow():
        answer = client.ask("get", under_way=lambda: hosts.cut("e1", fault), **read)
    assert all(answer["came"]) and not answer["wrong"]
    assert answer["seconds"] < deadline_s + 1.0
    after = client.nics()
    moved = moved_by(after, before, "read")
    assert moved["e0"] > moved["e1"] > 0, moved
    assert after["e1"]["cooling_down"] == 1 and after["e0"]["cooling_down"] == 0
    troubles = [nics["e1"]["abandoned"] + nics["e1"]["failures"] for nics in (before, after)]
    assert troubles[1] > troubles[0]
    again = client.ask("get", **read)  # with the card cut: nothing waits for it
    assert all(again["came"]) and not again["wrong"]
    hosts.heal()
    healed = client.nics()
    last = client.ask("get", **read)
    assert all(last["came"]) and not last["wrong"]
    assert moved_by(client.nics(), healed, "read")["e1"] > 0
    assert client.ask("counters")["pending"] == 0


def test_a_card_that_is_cut_in_the_middle_of_a_write_costs_fresh_slots_and_no_block(
    hosts: TwoHosts,
) -> None:
    client, numbers = hosts.client, list(range(100, 148))
    before = client.nics()
    write = {"numbers": numbers, "size_bytes": MB, "deadline_s": 20.0}
    with hosts.slow("a"):
        answer = client.ask("put", under_way=lambda: hosts.cut("e1", "own link"), **write)
    assert all(answer["stored"]), answer
    assert answer["seconds"] < 21.0
    abandoned = client.nics()["e1"]["abandoned"] - before["e1"]["abandoned"]
    assert abandoned > 0, "the write ended before the card was cut"
    for _ in range(2):  # while it is cut; and when what the kernel kept has been sent
        read = client.ask("get", **write)
        assert all(read["came"]) and not read["wrong"]
        hosts.heal()


def test_what_comes_late_over_a_card_that_was_given_up_reaches_no_memory(
    hosts: TwoHosts, stored: list[int]
) -> None:
    client = hosts.client
    read = {"numbers": stored, "size_bytes": MB, "deadline_s": 20.0}
    with hosts.slow():
        answer = client.ask("get", under_way=lambda: hosts.cut("e1", "silent loss"), **read)
    assert all(answer["came"]) and client.nics()["e1"]["abandoned"] > 0
    client.ask("fill", value=7)  # the memory serves something else now
    hosts.undo()
    hosts.wait_for_unread_bytes("e1")
    assert client.ask("holds", value=7) == {"holds": True}
    hosts.heal()
    assert client.ask("holds", value=7) == {"holds": True}


def test_a_frozen_node_is_no_reason_to_give_a_card_up(hosts: TwoHosts, stored: list[int]) -> None:
    client = hosts.client
    frozen = client.ask("counters")["frozen"]
    os.kill(hosts.node.process.pid, signal.SIGSTOP)
    try:
        answer = client.ask("get", numbers=stored, size_bytes=MB, deadline_s=4.0)
        assert not any(answer["came"]) and answer["seconds"] < 14.0
    finally:
        os.kill(hosts.node.process.pid, signal.SIGCONT)
    counted = client.ask("counters")
    nics = counted["nics"].values()
    assert counted["frozen"] == frozen and not any(nic["cooling_down"] for nic in nics)
    hosts.wait_until(lambda: client.ask("counters")["pending"] == 0)
    hosts.wait_until(
        lambda: all(client.ask("get", numbers=stored, size_bytes=MB, deadline_s=4.0)["came"])
    )


def test_with_every_card_cut_a_read_is_a_miss_at_its_deadline_and_works_again_later(
    hosts: TwoHosts, stored: list[int]
) -> None:
    client = hosts.client
    read = {"numbers": stored, "size_bytes": MB, "deadline_s": 3.0}

    def cut_both() -> None:
        hosts.cut("e0", "silent loss")
        hosts.cut("e1", "silent loss")

    with hosts.slow():
        answer = client.ask("get", under_way=cut_both, **read)
    assert not all(answer["came"]) and not answer["wrong"] and answer["seconds"] < 3.0 + 10.0
    hosts.heal()

    def is_read() -> bool:
        said = client.ask("get", **read)
        assert not said["wrong"]
        return all(said["came"])

    hosts.wait_until(is_read)


@pytest.mark.parametrize("trusted", ["e1", ""])
def test_only_trusted_cards_carry_kv_by_nixl(tmp_path: Path, trusted: str) -> None:
    hosts = two_hosts(tmp_path, {"MOONCAKE_TRUSTED_NICS": trusted})
    try:
        client = hosts.client
        before = {link: hosts.received_bytes(link) for link in ("e0", "e1")}
        assert all(client.ask("put", numbers=[1], size_bytes=4 * MB, deadline_s=9.0)["stored"])
        read = client.ask("get", numbers=[1], size_bytes=4 * MB, deadline_s=9.0)
        assert read["came"] == [True] and not read["wrong"]
        counted = client.ask("counters")
        by = {name: each["read_bytes"] for name, each in counted["transports"].items()}
        came = {link: hosts.received_bytes(link) - before[link] for link in before}
        if trusted:
            assert list(counted["nics"]) == ["e1"]
            assert by["nixl"] >= 4 * MB and by["tcp"] == 0
            assert came["e0"] < MB and came["e1"] > 4 * MB
        else:
            assert counted["nics"] == {} and by["tcp"] >= 4 * MB and by["nixl"] == 0
    finally:
        hosts.close()


def test_hosts_with_one_card_each_have_one_agent_as_ever(tmp_path: Path) -> None:
    hosts = two_hosts(tmp_path, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "e0"}, links=1)
    try:
        client = hosts.client
        assert all(client.ask("put", numbers=[1], size_bytes=MB, deadline_s=9.0)["stored"])
        assert client.ask("get", numbers=[1], size_bytes=MB, deadline_s=9.0)["came"] == [True]
        counted = client.ask("counters")
        assert counted["is_single"] and counted["nics"] == {}
        assert counted["transports"]["nixl"]["read_bytes"] >= MB
    finally:
        hosts.close()


class KnownBlocks:
    """What is stored, of a walk: number -> size in bytes.

    A block is lost only in the way that transports/nic_transport.py tells of: bytes that the kernel
    kept for a card which was cut again and again may arrive after the quarantine of their slots;
    what lies there then is found broken, is given up and is a miss.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.lost = client, 0
        self.sizes: dict[int, int] = {}

    def forget_what_was_lost(self) -> set[int]:
        numbers = list(self.sizes)
        said = self.client.ask("exist", numbers=numbers)["exist"] if numbers else []
        gone = {number for number, is_there in zip(numbers, said, strict=True) if not is_there}
        for number in gone:
            del self.sizes[number]
        self.lost += len(gone)
        return gone

    def get(self, numbers: list[int], cut: Callable[[], object], **how: float) -> dict[str, Any]:
        said = self.client.ask("get", cut, numbers=numbers, **how)
        assert not said["wrong"], said
        missed = {n for n, is_here in zip(numbers, said["came"], strict=True) if not is_here}
        return {**said, "missed": missed}

    def put(self, numbers: list[int], cut: Callable[[], object], **how: Any) -> dict[str, Any]:
        said = self.client.ask("put", cut, numbers=numbers, **how)
        missed = {n for n, is_there in zip(numbers, said["stored"], strict=True) if not is_there}
        if not missed:  # otherwise a miss, or there after all: not known
            self.sizes.update(dict.fromkeys(numbers, how["size_bytes"]))
        return {**said, "missed": missed}

    def remove_the_oldest(self) -> None:
        """As many as keep the node far from what makes it evict."""
        while sum(self.sizes.values()) > HELD_BYTES_MAX:
            oldest = next(iter(self.sizes))
            del self.sizes[oldest]
            self.client.ask("remove", numbers=[oldest])

    def is_served(self) -> bool:
        if not self.sizes:
            return True
        number, size_bytes = next(iter(self.sizes.items()))
        missed = self.get([number], lambda: None, size_bytes=size_bytes, deadline_s=4.0)["missed"]
        return missed <= self.forget_what_was_lost()


@pytest.mark.timeout(900)  # a step takes five seconds here, and up to a minute on a busy machine
@pytest.mark.parametrize("steps", [3, pytest.param(24, marks=pytest.mark.long)])
def test_random_cuts_during_random_reads_and_writes(hosts: TwoHosts, steps: int, seed: int) -> None:
    """Bytes are always right, and the loss of a card that carries only KV costs no call a block."""
    chance, client = random.Random(seed), hosts.client
    known = KnownBlocks(client)
    for step in range(steps):
        size_bytes = chance.choice((256 * 1024, MB, 4 * MB))
        faults = chance.choice(([], ["e0"], ["e1"], ["e1"], ["e0", "e1"]))
        kind = chance.choice(("own link", "their link", "silent loss"))

        def cut(links: list[str] = faults, kind: str = kind) -> None:
            for link in links:
                hosts.cut(link, kind)

        with hosts.slow("a"), hosts.slow("b"):
            if chance.random() < 0.5 or not known.sizes:
                numbers = [10_000 + 100 * step + at for at in range(8)]
                said = known.put(numbers, cut, size_bytes=size_bytes, deadline_s=10.0)
            else:
                size_bytes = chance.choice(list(known.sizes.values()))
                numbers = [number for number, size in known.sizes.items() if size == size_bytes]
                numbers = chance.sample(numbers, min(8, len(numbers)))
                said = known.get(numbers, cut, size_bytes=size_bytes, deadline_s=10.0)
        assert said["seconds"] < 14.0, (step, said)
        is_last = client.ask("counters")["frozen"] == FROZEN_MAX
        hosts.heal()
        # The directory is behind e0: without it a call may be a miss. So may it when as many
        # agents were given up as may be.
        is_unharmed = said["missed"] <= known.forget_what_was_lost()
        assert is_unharmed or "e0" in faults or is_last, (step, faults, kind, said)
        known.remove_the_oldest()
        if "e0" in faults:  # a node that failed is left alone for a moment
            hosts.wait_until(known.is_served)
    for size_bytes in set(known.sizes.values()):
        numbers = [number for number, size in known.sizes.items() if size == size_bytes]
        said = known.get(numbers, lambda: None, size_bytes=size_bytes, deadline_s=30.0)
        assert said["missed"] <= known.forget_what_was_lost(), said
    counted = client.ask("counters")
    abandoned = sum(nic["abandoned"] for nic in counted["nics"].values())
    print(f"{known.lost} blocks were broken by what came late; {abandoned} parts were abandoned")
    assert known.lost == 0 or abandoned > 0
    assert counted["frozen"] <= FROZEN_MAX, counted
