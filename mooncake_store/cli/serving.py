"""A whole store on one host: a directory and storage nodes as child processes, until Ctrl-C.

A child that exits is restarted at once, at most RESTARTS_MAX (child_processes.py) times a minute.
After one more exit, `supervise` raises ChildDied. The command then stops all processes and prints
the end of the child's log. `mooncake serve` has its own launcher, because it also starts Triton.
"""

from __future__ import annotations

import itertools
import os
import sys
from functools import partial
from pathlib import Path

from mooncake_store.process.child_processes import ChildProcess, Command

START_S_MAX = 60.0  # longest time from the start of a process until it is ready
STOP_S_MAX = 15.0  # a process that does not exit within this time is killed
UNIT_BYTES = 16 * 2**10  # allocation unit of the storage nodes; its header takes 0.4 % of memory


def directory_address(folder: Path) -> str:
    return f"ipc://{folder}/directory"


def events_address(folder: Path) -> str:
    return f"ipc://{folder}/events"


def directory_command(address: str, events: str, *options: str) -> list[str]:
    addresses = ["--address", address, "--events", events]
    return [sys.executable, "-m", "mooncake_store.directory", *addresses, *options]


def node_command(
    directory: str,
    node: str,
    dram_bytes: int,
    control: str,
    ssd_folder: Path | None,
    ssd_bytes: int,
    events: str,
    *options: str,
) -> list[str]:
    """Command of a storage node; `directory`, `control` and `events` are addresses. For a node with
    an SSD, this function creates the folder `ssd_folder`/`node`, whose blocks survive restarts."""
    values = {
        "--node-id": node,
        "--directory": directory,
        "--events": events,
        "--segment-bytes": str(dram_bytes),
        "--unit-bytes": str(UNIT_BYTES),
        "--control": control,
    }
    if ssd_folder is not None and ssd_bytes:
        (ssd_folder / node).mkdir(parents=True, exist_ok=True)
        size_bytes = -(-ssd_bytes // UNIT_BYTES) * UNIT_BYTES
        values |= {"--ssd-path": str(ssd_folder / node), "--ssd-bytes": str(size_bytes)}
    command = [sys.executable, "-m", "mooncake_store.node", "--die-with-parent"]
    return [*command, *itertools.chain(*values.items()), *options]


class StoreProcesses:
    """The processes of one store. `folder` contains their sockets and logs."""

    def __init__(
        self,
        folder: Path,
        nodes: list[str],
        dram_bytes: int,
        ssd_folder: Path | None,
        ssd_bytes: int,
        directory_options: list[str],
        node_options: list[str],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = directory_address(folder)
        events = events_address(folder)
        self._folder = folder
        self.children: list[ChildProcess] = []  # started children, in the order of their start
        self._commands = {"directory": directory_command(self.address, events, *directory_options)}
        for node in nodes:
            self._commands[node] = node_command(
                self.address,
                node,
                dram_bytes,
                f"ipc://{folder}/{node}",
                ssd_folder,
                ssd_bytes,
                events,
                *node_options,
            )

    def start(self) -> None:
        """Start all processes, one after the other. ChildDied: one has ended or is too slow."""
        for name, arguments in self._commands.items():
            command, log = partial(Command, arguments, os.environ), self._folder / f"{name}.log"
            child = ChildProcess(name, command, log, self._folder)
            self.children.append(child)
            child.wait_for_line("ready", START_S_MAX)

    def supervise(self) -> list[str]:
        """Restart processes that exited; returns the restarted ones. ChildDied: too many exits."""
        for child in self.children:
            child.bound_log()
        return [child.name for child in self.children if child.supervise() is not None]

    def stop(self) -> None:
        """Stop the nodes before the directory, because they deregister from it."""
        for child in reversed(self.children):
            child.terminate()
            child.finish(STOP_S_MAX)
