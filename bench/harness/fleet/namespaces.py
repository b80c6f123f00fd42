"""Network namespaces of one machine as hosts, each with links to switches.

    with Namespaces(("a", "b", "c")) as hosts:
        hosts.address("a")                       # 10.77.0.1
        subprocess.Popen(hosts.command("a", ["curl", ...]))
        with hosts.cut("a", "b"):                # until the block ends

The switch (a bridge for each link) is in a namespace of its own. This machine's network only gets
one interface more, through which this process reaches all hosts from `outside`. Links of a host are
e0, e1, ...; each host has its own `lo`. All hosts share files, /dev/shm, process ids and the clock.

The end of the block removes everything. The next run removes the namespaces and processes of a run
that was killed: names carry the process id (mc-PID-HOST), and a namespace older than the process of
that id belongs to a dead run.

Not here: faults of the network (faults.py), processes of a host (host.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.harness.fleet.faults import NamespaceFailed, NetworkFault, dropped, run_tool, slowed

TOOLS = ("ip", "nft", "tc")
FOLDER = Path("/run/netns")  # `ip netns` keeps a file here for each
LOCK = Path(tempfile.gettempdir()) / "mooncake-namespaces.lock"
SWITCH = "switch"
SUBNETS, HOSTS_MAX, LINKS_MAX = 250, 200, 4
OUTSIDE = 254  # last byte of this process's own address
END_S_MAX = 10.0
_LABEL = re.compile(r"lo:mc(\d+)")  # label of this process's own address
_NAME = re.compile(r"mc-(\d+)(?:\.\d+)?-[A-Za-z0-9_]+")


@functools.cache
def why_no_namespaces() -> str:
    """Why namespaces cannot be made here; "" when they can. Tries it once."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (Debian: iproute2, nftables)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with Namespaces(("a", "b")) as pair, pair.loss("a", 1.0), pair.rate("a", 1e6):
            pass
    except (NamespaceFailed, OSError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


class Namespaces:
    """Made by the constructor; `close`, or the end of the block, removes them."""

    def __init__(self, hosts: Sequence[str] = ("a", "b", "c"), links: int = 1) -> None:
        assert 0 < len(hosts) <= HOSTS_MAX and 0 < links <= LINKS_MAX, (hosts, links)
        assert all(re.fullmatch(r"[a-z][a-z0-9]*", host) for host in hosts) and SWITCH not in hosts
        self.hosts, self.links = tuple(hosts), tuple(f"e{number}" for number in range(links))
        with _locked():
            remove_leftovers()
            self._prefix = _free_prefix()
            self._subnet = _free_subnet(links)
            try:
                self._make()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def name(self, host: str) -> str:
        """The namespace's name for `ip netns`."""
        assert host in self.hosts or host == SWITCH, f"{host} is none of {self.hosts}"
        return f"{self._prefix}-{host}"

    def address(self, host: str, link: str = "e0") -> str:
        return self._address(self.hosts.index(host) + 1, link)

    @property
    def outside(self) -> str:
        """This process's own address in the hosts' network."""
        return self._address(OUTSIDE, "e0")

    def network(self, link: str) -> str:
        return f"{self._address(0, link)}/24"

    def port(self, host: str, link: str) -> str:
        """The switch's end of a host's link."""
        return f"p{self.hosts.index(host) + 1}{link}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs it on that host; `ip` execs the command, so the process id
        stays."""
        return [str(shutil.which("ip")), "netns", "exec", self.name(host), *command]

    def pids(self, host: str) -> list[int]:
        return [int(pid) for pid in run_tool("ip", "netns", "pids", self.name(host)).split()]

    def cut(self, host: str, *others: str, link: str | None = None) -> NetworkFault:
        """Drop all packets between the host and the others (none given: all others)."""
        pairs = [(host, other) for other in self._others(host, others)]
        both = [*pairs, *((other, host) for _, other in pairs)]
        return self._lost(f"{host} cut from {' '.join(other for _, other in pairs)}", both, link)

    def cut_one_way(self, sender: str, *receivers: str, link: str | None = None) -> NetworkFault:
        """Drop packets from the sender to the receivers; the other direction works."""
        pairs = [(sender, other) for other in self._others(sender, receivers)]
        name = f"{' '.join(other for _, other in pairs)} deaf to {sender}"
        return self._lost(name, pairs, link)

    def loss(self, host: str, percent: float) -> NetworkFault:
        """Drop that percentage of the packets between the host and the others, in both
        directions.
        """
        assert 0 < percent <= 100, percent
        others = self._others(host, ())
        both = [(host, other) for other in others] + [(other, host) for other in others]
        match = f"numgen random mod 10000 < {percent * 100:.0f}"
        return self._lost(f"{host} loses {percent:g} %", both, None, match)

    def rate(self, host: str, bytes_per_s: float, link: str = "e0") -> NetworkFault:
        """Limit the rate of the host's link in each direction; traffic of this process counts
        too.
        """
        ends = [(self.name(host), link), (self.name(SWITCH), self.port(host, link))]
        return slowed(f"{host} at {bytes_per_s:,.0f} bytes/s", ends, bytes_per_s)

    def link(self, host: str, up: bool = False, link: str = "e0") -> NetworkFault:
        """Take the host's link down, for this process too. `up=True` changes nothing."""
        down = [] if up else [(self.name(host), f"ip link set {link} down")]
        again = [(self.name(host), f"ip link set {link} up")]
        return NetworkFault(f"{link} of {host} down", down, again)

    def _others(self, host: str, given: Sequence[str]) -> list[str]:
        assert host not in given, f"{host} and itself"
        return list(given) or [other for other in self.hosts if other != host]

    def _lost(
        self, name: str, pairs: Sequence[tuple[str, str]], link: str | None, match: str = ""
    ) -> NetworkFault:
        """Rules that drop packets from each first host to each second one."""
        links = self.links if link is None else (link,)
        return dropped(
            name,
            [
                (self.name(receiver), f"ip saddr {self.address(sender, each)} {match}")
                for sender, receiver in pairs
                for each in links
            ],
        )

    def close(self) -> None:
        """End the remaining processes on the hosts and remove the hosts. A second call is
        harmless.
        """
        with contextlib.suppress(NamespaceFailed):
            # Removing its namespace would remove it too, but later.
            run_tool("ip", "-n", self.name(SWITCH), "link", "del", "outside")
        with contextlib.suppress(NamespaceFailed):
            run_tool("ip", "addr", "del", f"{self.outside}/32", "dev", "lo")
        _remove([self.name(host) for host in (*self.hosts, SWITCH)])

    def _address(self, number: int, link: str) -> str:
        return f"10.{77 + self.links.index(link)}.{self._subnet}.{number}"

    def _make(self) -> None:
        for host in (*self.hosts, SWITCH):
            run_tool("ip", "netns", "add", self.name(host))
            run_tool("ip", "-n", self.name(host), "link", "set", "lo", "up")
        for link in self.links:
            self._in(SWITCH, f"link add {link} type bridge")
            self._in(SWITCH, f"link set {link} up")
            for host in self.hosts:
                self._connect(self.name(host), host, link)
        self._connect_outside()

    def _connect(self, namespace: str, host: str, link: str) -> None:
        port = self.port(host, link)
        peer = f"peer name {port} netns {self.name(SWITCH)}"
        self._in(host, f"link add {link} type veth {peer}")
        # IPv6 addresses would be a second path around the faults.
        self._in(host, f"link set {link} addrgenmode none up")
        self._in(host, f"addr add {self.address(host, link)}/24 dev {link}")
        self._in(SWITCH, f"link set {port} master {link} up")

    def _connect_outside(self) -> None:
        """This process's address is on loopback, and its interface has none. UCX uses every
        interface with an address, and a process that uses one ends when the interface is removed.
        """
        own = f"mc{os.getpid()}s{self._subnet}"
        run_tool(
            *f"ip link add {own} type veth peer name outside netns {self.name(SWITCH)}".split()
        )
        run_tool(*f"ip link set {own} addrgenmode none up".split())
        self._in(SWITCH, "link set outside master e0 up")
        run_tool(*f"ip addr add {self.outside}/32 dev lo label lo:mc{os.getpid()}".split())
        run_tool(*f"ip route add {self.network('e0')} dev {own} src {self.outside}".split())

    def _in(self, host: str, words: str) -> None:
        run_tool("ip", "-n", self.name(host), *words.split())


def remove_leftovers() -> list[str]:
    """Remove namespaces and processes of dead runs; returns the namespaces' names."""
    dead = []
    for path in sorted(FOLDER.glob("mc-*")) if FOLDER.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):
            if match and not _lives(int(match[1]), path.stat().st_mtime):
                dead.append(path.name)
    _remove(dead)
    for label, address in _addresses_of_loopback():
        match = _LABEL.fullmatch(label)
        if match and not psutil.pid_exists(int(match[1])):
            run_tool("ip", "addr", "del", f"{address}/32", "dev", "lo")
    return dead


def _addresses_of_loopback() -> list[tuple[str, str]]:
    """Label and address of each."""
    found = run_tool("ip", "-j", "-4", "addr", "show", "lo")
    listed: list[dict[str, Any]] = json.loads(found or "[]")
    return [(each["label"], each["local"]) for link in listed for each in link["addr_info"]]


def _lives(pid: int, made_s: float) -> bool:
    """Whether the process of that id is the one that existed at `made_s`, not a later one."""
    try:
        return psutil.Process(pid).create_time() <= made_s + 1.0  # the kernel counts in ticks
    except psutil.NoSuchProcess:
        return False


def _remove(names: Sequence[str]) -> None:
    here = [name for name in names if (FOLDER / name).exists()]
    give_up_s = time.monotonic() + END_S_MAX
    for name in here:
        # A remaining process would keep its namespace, with its addresses, forever.
        while (pids := _pids(name)) and time.monotonic() < give_up_s:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    for name in here:
        with contextlib.suppress(NamespaceFailed):
            run_tool("ip", "netns", "del", name)


def _pids(name: str) -> list[int]:
    with contextlib.suppress(NamespaceFailed):
        return [int(pid) for pid in run_tool("ip", "netns", "pids", name).split()]
    return []


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """A lock among all runs of this machine, from finding a free network until it is taken."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_prefix() -> str:
    """mc-PID, or mc-PID.N when this process has others."""
    for number in range(SUBNETS):
        prefix = f"mc-{os.getpid()}" + (f".{number}" if number else "")
        if not (FOLDER / f"{prefix}-{SWITCH}").exists():
            return prefix
    raise NamespaceFailed(f"this process has {SUBNETS} sets of namespaces already")


def _free_subnet(links: int) -> int:
    """The least X for which this machine has no route to 10.77.X.0 (nor 10.78.X.0, ...)."""
    listed: list[dict[str, Any]] = json.loads(run_tool("ip", "-j", "-4", "addr") or "[]")
    taken = {each["local"].rpartition(".")[0] for link in listed for each in link["addr_info"]}
    for subnet in range(SUBNETS):
        if not taken & {f"10.{77 + number}.{subnet}" for number in range(links)}:
            return subnet
    raise NamespaceFailed("no network of 10.77.0.0 to 10.77.249.0 is free")
