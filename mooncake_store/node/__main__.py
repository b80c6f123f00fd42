"""Process of a storage node: options, signals, the report loop and the exit.

stdout has one line, `ready node_id=... incarnation=... segment_bytes=...`; the log goes to stderr.

Not here: the storage node itself (node.py).
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import RequestInvalid, StoreError
from mooncake_store.memory.segment import numa_nodes
from mooncake_store.memory.segment_file import NoRoom
from mooncake_store.node.node import Clients, NodeOptions, StorageNode
from mooncake_store.process.logs import start_logging
from mooncake_store.records.membership import UNIT_BYTES
from mooncake_store.wire.port_options import add_port_options, apply_insecure

log = logging.getLogger("mooncake_store.node")
REPORT_S = 1.0  # seconds between two reports to the directory
# seconds from a failed report to the next one; short, so that a new leader is found soon
SILENT_RETRY_S = 0.2
ROOM_LOOK_S = 0.1  # seconds between attempts to allocate the segment
# timeout of an inventory message; the reply to the last message takes 10 s for a million blocks
INVENTORY_S_MAX = 60.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the thread that started this process ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mooncake_store.node", description="A storage node.")
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--directory", required=True, help="address of the directory")
    parser.add_argument(
        "--events",
        default="",
        help="address of the directory's event stream (an etcd:// directory publishes it): this "
        "host then has a replica of the index, so its readers need no lookups at the directory",
    )
    _add_memory_options(parser)
    parser.add_argument("--mapped-only", action="store_true", help="run without NIXL")
    parser.add_argument(
        "--rack", default="", help="label; nodes with one label have a short network path"
    )
    parser.add_argument(
        "--control",
        help="address for client requests: ipc://PATH or tcp://HOST:PORT, port 0 for any "
        "(default: with an SSD ipc://<segment path>.control, else none)",
    )
    parser.add_argument(
        "--data",
        default="",
        metavar="HOST:PORT",
        help="serve the segment over plain TCP too, for clients without NIXL; port 0 for any",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="CONTROL,DATA",
        help="addresses for clients, if they differ from those of --control and --data",
    )
    add_port_options(parser)
    _add_ssd_options(parser)
    parser.add_argument(
        "--die-with-parent",
        action="store_true",
        help="exit when the thread that started this process ends",
    )
    return parser


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--segment-bytes", required=True, type=int, help="size of the segment in DRAM"
    )
    parser.add_argument(
        "--segment-path",
        help="a file, or several joined by ':' that share the size equally "
        "(default: /dev/shm/mooncake-node-<uid>-<node id>)",
    )
    parser.add_argument(
        "--segment-numa",
        metavar="N,N",
        help="NUMA node of each file of --segment-path, in the same order",
    )
    parser.add_argument(
        "--unit-bytes",
        type=int,
        default=UNIT_BYTES,
        help="unit of allocation, a power of two; a block takes a whole number of units "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--room-s-max",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="longest wait for memory that other processes still use, e.g. those that map the "
        "previous incarnation's segment (default: %(default)s)",
    )


def _add_ssd_options(parser: argparse.ArgumentParser) -> None:
    ssd = parser.add_argument_group("SSD tier")
    ssd.add_argument("--ssd-path", help="a folder for the blocks and their manifest")
    ssd.add_argument("--ssd-bytes", type=int, default=0, help="size of the file of blocks")
    ssd.add_argument("--ssd-reset", action="store_true", help="discard the blocks in the folder")
    ssd.add_argument(
        "--ssd-io",
        choices=("nixl", "threads"),
        default="nixl",
        help="NIXL's POSIX plugin (with threads as fallback), or always threads",
    )


def _options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NodeOptions:
    """Check the parsed arguments and convert them to NodeOptions. Exits with a message if one is
    invalid."""
    unit_bytes, ssd_bytes = arguments.unit_bytes, arguments.ssd_bytes
    if unit_bytes < UNIT_BYTES or unit_bytes & (unit_bytes - 1):
        parser.error(f"--unit-bytes {unit_bytes}: must be a power of two, at least {UNIT_BYTES}")
    if not 0 <= arguments.room_s_max <= 3_600:
        parser.error(f"--room-s-max {arguments.room_s_max:g}: must be 0 to 3600 seconds")
    if arguments.segment_bytes <= 0:
        parser.error(f"--segment-bytes {arguments.segment_bytes}: must be more than 0")
    if bool(arguments.ssd_path) != (ssd_bytes > 0):
        parser.error("--ssd-path and --ssd-bytes must be given together")
    if ssd_bytes % unit_bytes:
        parser.error(f"--ssd-bytes {ssd_bytes}: must be a multiple of --unit-bytes {unit_bytes}")
    if arguments.data and not arguments.data.rpartition(":")[2].isdecimal():
        parser.error(f"--data {arguments.data}: use HOST:PORT")
    path = arguments.segment_path or f"/dev/shm/mooncake-node-{os.getuid()}-{arguments.node_id}"
    numa = _numa(parser, arguments.segment_numa, path.count(":") + 1)
    control = arguments.control
    if control is None:
        control = f"ipc://{path.split(':')[0]}.control" if arguments.ssd_path else ""
    given = vars(arguments) | {
        "segment_path": path,
        "segment_numa": numa,
        "is_mapped_only": arguments.mapped_only,
        "ssd_folder": os.path.abspath(arguments.ssd_path) if arguments.ssd_path else "",
        "must_reset_ssd": arguments.ssd_reset,
        "control": control,
        "advertised": arguments.advertise,
        "has_other_hosts": not arguments.directory.startswith("ipc://"),
    }
    return NodeOptions(**{field.name: given[field.name] for field in fields(NodeOptions)})


def _numa(parser: argparse.ArgumentParser, text: str | None, files: int) -> tuple[int, ...]:
    if not text:
        return ()
    there = numa_nodes()
    try:
        wished = tuple(int(word) for word in text.split(","))
    except ValueError:
        parser.error(f"--segment-numa {text}: use numbers, as in 0,1")
    if len(wished) != files or not set(wished) <= set(there):
        parser.error(f"--segment-numa {text}: give {files} NUMA nodes of {there}, one per file")
    return wished


class StopSignals:
    """SIGTERM and SIGINT, recorded in a pipe, so that no handler interrupts other code.

    A signal mask with sigtimedwait is not enough, because numpy starts threads before the mask is
    set. The kernel would deliver the signal to such a thread, and the process would exit.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def raise_one(self) -> None:
        """Simulate a signal. May be called from any thread."""
        os.write(self._write_end, b"\0")

    def wait(self, seconds: float) -> bool:
        """True if a signal has arrived since the start, or arrives within `seconds`. The pipe is
        never drained, so all later calls return True. After SIGSTOP and SIGCONT, a node must report
        at once. poll(2) is used because its timeout also passes while the process is stopped; that
        of select(2) does not."""
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        return bool(poll.poll(1000 * seconds))


def started(
    options: NodeOptions, clients: Clients, stop: StopSignals, room_s_max: float
) -> StorageNode | None:
    """Start the node as soon as there is memory for its segment; None if a signal arrives first.
    The memory of a dead incarnation is not free until the last process has unmapped it.
    StoreError: the node cannot start."""
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        try:
            node = StorageNode(options, clients, stop.raise_one)
        except NoRoom as error:
            if waited_s >= room_s_max:
                raise
            if waited_s < ROOM_LOOK_S:  # warn only after the first attempt
                log.warning(
                    "node_id=%s waits up to %g s until other processes have freed memory: %s",
                    options.node_id,
                    room_s_max,
                    error,
                )
            if stop.wait(ROOM_LOOK_S):
                return None
        else:
            if waited_s >= ROOM_LOOK_S:
                log.info("node_id=%s had room after %.1f s", options.node_id, waited_s)
            return node


def run(address: str, options: NodeOptions, stop: StopSignals, room_s_max: float) -> int:
    """Serve until a signal arrives, then return 0. Returns 1 if the node cannot start, or if the
    directory rejects the node, for example because a newer process replaced it."""
    node_id = options.node_id
    with (
        DirectoryClient(address) as reports,
        DirectoryClient(address, INVENTORY_S_MAX) as inventories,
        DirectoryClient(address) as background,
    ):
        clients = Clients(reports, inventories, background)
        try:
            node = started(options, clients, stop, room_s_max)
        except StoreError as error:
            log.error("node_id=%s cannot start: %s", node_id, error)
            return 1
        if node is None:
            return 0
        is_announced = False
        try:
            while True:
                is_answered = node.report()
                if is_answered and not is_announced:
                    is_announced = True
                    print(
                        f"ready node_id={node_id} incarnation={node.info.incarnation} "
                        f"segment_bytes={node.info.segment_bytes}",
                        flush=True,
                    )
                if stop.wait(REPORT_S if is_answered else SILENT_RETRY_S):
                    return 0
        except RequestInvalid as error:
            log.error("node_id=%s exits: %s", node_id, error)
            return 1
        finally:
            node.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the process. Ends by os._exit, because UCX's exit handlers may crash (nixl_agent.py)."""
    stop = StopSignals()
    parser = _parser()
    arguments = parser.parse_args(argv)
    options = _options(parser, arguments)
    apply_insecure(arguments)
    start_logging("%(asctime)s %(name)s %(message)s")
    if arguments.die_with_parent:
        die_with_parent()
    status = 1
    try:
        status = run(arguments.directory, options, stop, arguments.room_s_max)
    except Exception:  # log the cause here, because os._exit prints no traceback
        log.exception("node_id=%s exits", options.node_id)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
