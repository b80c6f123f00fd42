"""The storage node: a process that owns a segment, offers it to NIXL and says that it lives.

python -m mooncake_store.node --node-id s0 --directory ipc:///tmp/directory --segment-bytes N \\
    --segment-path /dev/shm/mooncake-s0

It moves no bytes: workers of this node map the segment, all others read it one-sided, served by
the NIXL agent's C++ thread. So KV outlives a worker, and the Python here only reports, once a
second. When the directory does not know the node (it restarted, or the node was silent for too
long) the node registers again, under the same incarnation: that names the life of this process and
its memory, and the directory hands out fresh generations anyway. A node that was replaced by a
newer process of the same name ends instead of fighting over the name.

stdout carries one line, `ready node_id=... incarnation=... segment_bytes=...`; the log is stderr.

Not here: what lies in the segment (directory.py), how clients reach it (nixl_transport.py).
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import secrets
import select
import signal
import sys
from collections.abc import Sequence

from mooncake_store.directory_client import DirectoryClient
from mooncake_store.errors import RequestInvalid, StoreError, StoreUnavailable
from mooncake_store.membership import NodeInfo
from mooncake_store.segment import Segment, host_id

log = logging.getLogger("mooncake_store.node")
REPORT_S = 1.0
_PR_SET_PDEATHSIG = 1


class StorageNode:
    """One life of a storage node: segment, agent, registration."""

    def __init__(
        self,
        node_id: str,
        directory: DirectoryClient,
        segment_path: str,
        segment_bytes: int,
        mapped_only: bool = False,
    ) -> None:
        self._directory = directory
        self._segment = Segment.create(segment_path, segment_bytes)
        self._agent = None
        self._is_registered = False
        incarnation = secrets.token_hex(8)
        try:
            if not mapped_only:
                from mooncake_store.nixl_agent import NodeAgent

                name = f"{node_id}#{incarnation}"  # a peer refuses a name that it already knows
                self._agent = NodeAgent(name, self._segment.address, segment_bytes)
        except BaseException:
            self._segment.close()
            raise
        self.info = NodeInfo(
            node_id=node_id,
            incarnation=incarnation,
            host_id=host_id(segment_path),
            segment_path=segment_path,
            segment_bytes=segment_bytes,
            agent_name=self._agent.name if self._agent else "",
            agent_metadata=self._agent.metadata if self._agent else b"",
            base_address=self._segment.address,
        )

    def report(self) -> bool:
        """Tell the directory that this node lives; register where it must. True: it knows now.

        RequestInvalid when a newer process has this node's name.
        """
        info = self.info
        try:
            if self._is_registered and self._directory.node_report(info.node_id, info.incarnation):
                return True
            self._directory.register_node(info)
        except StoreUnavailable as error:
            log.warning("node_id=%s directory silent: %s", info.node_id, error)
            return False
        if self._is_registered:
            log.warning("node_id=%s registered again: the directory forgot it", info.node_id)
        self._is_registered = True
        return True

    def close(self) -> None:
        """Deregister, drop the agent, unlink the segment. Twice is harmless."""
        if self._is_registered:
            self._is_registered = False
            try:
                self._directory.deregister_node(self.info.node_id, self.info.incarnation)
            except StoreError as error:  # it will find out: the lease runs out
                log.warning("node_id=%s not deregistered: %s", self.info.node_id, error)
        if self._agent is not None:
            self._agent.close()
        self._segment.close()


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the thread that started this process ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mooncake_store.node", description="A storage node.")
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--directory", required=True, help="address of the directory")
    parser.add_argument("--segment-bytes", required=True, type=int, help="DRAM to offer")
    parser.add_argument("--segment-path", help="default: /dev/shm/mooncake-<uid>-<node id>")
    parser.add_argument("--mapped-only", action="store_true", help="no NIXL: one host only")
    parser.add_argument(
        "--die-with-parent",
        action="store_true",
        help="end when the thread that started this process ends",
    )
    return parser.parse_args(argv)


class StopSignals:
    """SIGTERM and SIGINT, noted in a pipe: no handler runs in the middle of anything.

    Blocking them and waiting with sigtimedwait is not enough: numpy's threads are older than any
    mask set here, and the kernel would give the signal to one of them, whose default is to die.
    """

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> bool:
        """Has one come, within that time or before?"""
        return bool(select.select([self._read_end], [], [], seconds)[0])


def run(arguments: argparse.Namespace, stop: StopSignals) -> int:
    """Serve until a signal says stop; the exit status."""
    node_id = arguments.node_id
    path = arguments.segment_path or f"/dev/shm/mooncake-{os.getuid()}-{node_id}"
    directory = DirectoryClient(arguments.directory)
    try:
        node = StorageNode(node_id, directory, path, arguments.segment_bytes, arguments.mapped_only)
    except StoreError as error:
        log.error("node_id=%s cannot start: %s", node_id, error)
        directory.close()
        return 1
    is_announced = False
    try:
        while True:
            if node.report() and not is_announced:
                is_announced = True
                print(
                    f"ready node_id={node_id} incarnation={node.info.incarnation} "
                    f"segment_bytes={node.info.segment_bytes}",
                    flush=True,
                )
            if stop.wait(REPORT_S):
                return 0
    except RequestInvalid as error:
        log.error("node_id=%s ends: %s", node_id, error)
        return 1
    finally:
        node.close()
        directory.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Process entry. Ends with os._exit: UCX's own exit handlers may crash (see nixl_agent)."""
    stop = StopSignals()
    arguments = _arguments(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    if arguments.die_with_parent:
        die_with_parent()
    status = 1
    try:
        status = run(arguments, stop)
    except Exception:  # process edge: say why, and still leave through os._exit
        log.exception("node_id=%s ends", arguments.node_id)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
