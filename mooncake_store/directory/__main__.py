"""The process of one directory: options, signals, and the election among several directories.

Without --etcd, the directory serves until a signal. With --etcd, it waits to be elected, serves
while elected, and waits again after losing the lead. Each leadership has a new Directory with a new
epoch, and the storage nodes report their blocks to it. The process prints a line `ready ...` on
stdout each time it begins to serve.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from types import FrameType

from mooncake_store.directory.core.config import HELP, DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.durable_verbs import DurableVerbs, restore
from mooncake_store.directory.election import MARGIN, TTL_S, Leader, campaign, parse_address
from mooncake_store.directory.journal import LeadLost, StateJournal
from mooncake_store.directory.server import AddressTaken, DirectoryServer
from mooncake_store.errors import RequestInvalid
from mooncake_store.keys.folder import KeysInvalid
from mooncake_store.process.logs import start_logging
from mooncake_store.process.metrics_page import PortTaken
from mooncake_store.wire.port_options import add_port_options, apply_insecure

log = logging.getLogger("mooncake_store.directory")
ETCD_S_MIN = 0.3  # least timeout of a call to one endpoint, however short the TTL


class StopSignal:
    """Stops the running server on SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.is_set = False
        self._server: DirectoryServer | None = None

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True
        if self._server is not None:
            self._server.stop()

    def forward_to(self, server: DirectoryServer) -> None:
        self._server = server
        if self.is_set:
            server.stop()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_store.directory",
        description="The directory of the KV store: the location of every block, all nodes and "
        "all workers. Prints one line that starts with 'ready' when it listens; SIGTERM stops it.",
    )
    parser.add_argument("--address", required=True, help="ipc:// or tcp:// address for requests")
    parser.add_argument("--events", required=True, help="ipc:// or tcp:// address of the events")
    parser.add_argument(
        "--self-check",
        action="store_true",
        help="check the invariants every second; exit on failure",
    )
    add_port_options(parser)
    election = parser.add_argument_group("election of one directory of several, through etcd")
    election.add_argument(
        "--etcd",
        default="",
        metavar="ADDRESS",
        help="etcd://HOST:PORT[,HOST:PORT...][/PREFIX]: serve while elected there, else wait",
    )
    election.add_argument(
        "--advertise",
        default="",
        metavar="ADDRESS,EVENTS",
        help="the two addresses that clients connect to (default: --address,--events)",
    )
    election.add_argument(
        "--ttl-s",
        type=int,
        default=TTL_S,
        metavar="SECONDS",
        help="seconds after which a dead leader is replaced (%(default)s)",
    )
    parser.add_argument("--log-level", default="INFO", help="level of the log on stderr (INFO)")
    for option in fields(DirectoryConfig):
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=type(option.default),
            default=option.default,
            help=f"{HELP[option.name]} (%(default)s)",
        )
    return parser.parse_args(arguments)


def serve(
    options: argparse.Namespace,
    directory: Directory,
    stop: StopSignal,
    may_serve: Callable[[], bool] = lambda: True,
    durable: DurableVerbs | None = None,
) -> None:
    """Serve until `stop` is set or `may_serve` is false. Raises AddressTaken or PortTaken."""
    server = DirectoryServer(
        directory, options.address, options.events, options.self_check, may_serve, durable
    )
    page = None
    try:
        if options.metrics_port:
            page = server.show_metrics(options.metrics_port, options.metrics_address)
        stop.forward_to(server)
        stop.listen()
        print(
            f"ready address={server.address} events={server.events_address} "
            f"epoch={directory.epoch}",
            flush=True,
        )
        server.run()
    finally:
        server.close()
        if page is not None:
            page.close()


def serve_when_elected(
    options: argparse.Namespace, config: DirectoryConfig, stop: StopSignal
) -> None:
    """Wait to be elected, serve, and wait again, until `stop` is set."""
    # If one endpoint hangs, this timeout leaves time for the others before the lease ends.
    etcd, prefix = parse_address(options.etcd, max(ETCD_S_MIN, MARGIN * options.ttl_s))
    address, _, events = (options.advertise or f"{options.address},{options.events}").partition(",")
    unusable = [name for name in (address, events) if not name or "*" in name or "0.0.0.0" in name]
    if unusable:
        raise RequestInvalid(
            f"clients cannot reach {unusable[0]!r}: set --advertise ADDRESS,EVENTS"
        )
    leader = Leader(address, events, f"{os.uname().nodename}/{os.getpid()}")
    stop.listen()
    while not stop.is_set:
        won = campaign(etcd, prefix, leader, lambda: stop.is_set, ttl_s=options.ttl_s)
        if won is None:
            return
        journal = StateJournal(etcd, prefix, won.epoch, won.revision, won.may_serve)
        try:
            directory = Directory(won.epoch, config, begin_s=won.margin_s)
            known = restore(directory, journal.begin(), now_s=0.0)
            durable = DurableVerbs(directory, journal, known)
            serve(options, directory, stop, won.may_serve, durable)
        except LeadLost as error:
            log.warning("lost the lead: %s", error)
        finally:
            # Writers mark the slots that this directory granted as "writing". The next leader
            # reads these marks, so this leader keeps the lead until the writers had time for them.
            if won.may_serve():
                time.sleep(won.margin_s)
            won.close()
        if not stop.is_set:
            log.warning("lost the lead; waits for the next election")


def with_huge_tables() -> None:
    """Restart this process with huge pages for large tables, unless GLIBC_TUNABLES is set.

    glibc reads its tunables only at the start of a process. An index of ten million keys is a table
    of 700 MB that is read at random. With huge pages, `exist` of 1,000 keys takes 2.3 times as long
    as in an index of 100,000 keys (python -m bench.directory). Without them, it takes 2.5 times.
    """
    if "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, "-m", "mooncake_store.directory", *sys.argv[1:]])


def raise_descriptor_limit() -> None:
    """Raise the limit, usually 1,024, as far as allowed: each local client takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where the limit cannot be raised
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    start_logging("%(asctime)s directory %(message)s", options.log_level)
    apply_insecure(options)
    config = DirectoryConfig(**{f.name: getattr(options, f.name) for f in fields(DirectoryConfig)})
    if problems := config.problems():
        print("\n".join(f"directory: {problem}" for problem in problems), file=sys.stderr)
        return 2
    # A block is an object outside of any reference cycle. With ten million blocks, a full garbage
    # collection would free nothing and delay requests by seconds. Young objects are collected.
    gc.set_threshold(50_000, 20, 1_000_000)
    raise_descriptor_limit()
    stop = StopSignal()
    try:
        if options.etcd:
            serve_when_elected(options, config, stop)
        else:
            # The epoch is the milliseconds since 1970. It must differ from the epochs of earlier
            # directories at this address. It need not be larger: the clock may have been set back.
            serve(options, Directory(time.time_ns() // 1_000_000, config), stop)
    except (AddressTaken, PortTaken, RequestInvalid, KeysInvalid) as error:
        print(f"directory: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with_huge_tables()
    sys.exit(main())
