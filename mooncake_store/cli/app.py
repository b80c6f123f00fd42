"""The commands of `mooncake store`. All but `serve` only make a few client calls."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mooncake_store.cli import serving
from mooncake_store.cli.arguments import (
    find_directory,
    own_folder,
    parse_bytes,
    parse_key,
    parse_nodes,
    shown_bytes,
)
from mooncake_store.client.client import StoreClient
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.memory.buffers import checksum
from mooncake_store.process.child_processes import (
    ChildDied,
    Stopped,
    ignore_signals,
    signals_as_exceptions,
)
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.records.status import DirectoryStats
from mooncake_store.wire.unix_socket import PATH_BYTES_MAX

app = typer.Typer(
    name="store",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The KV cache store: run it alone, inspect it, put and get blocks, drain and check nodes.",
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
CHECKED_AT_ONCE = 32  # blocks per read of `check`

Directory = Annotated[
    str,
    typer.Option(
        "--directory", help="Address of the directory (default: the one found on this host)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


@contextlib.contextmanager
def shown_errors() -> Iterator[None]:
    """Print an error of the store or of a child process on stderr, and exit with status 1."""
    try:
        yield
    except (StoreError, ChildDied, OSError) as error:  # a ZMQError is an OSError
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.print(str(error), markup=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def serve(
    nodes: Annotated[str, typer.Option(help="Names of the storage nodes, as in s0,s1.")] = "s0",
    store_bytes: Annotated[str, typer.Option(help="DRAM per node, in /dev/shm.")] = "1G",
    ssd_bytes: Annotated[str, typer.Option(help="SSD per node; 0: none.")] = "0",
    ssd_path: Annotated[Path | None, typer.Option(help="Folder on the SSD for the blocks.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder for sockets and logs.")] = None,
    directory_option: Annotated[
        list[str] | None,
        typer.Option(help="Option for the directory, as in --directory-option=--node-ttl-s=3."),
    ] = None,
    node_option: Annotated[
        list[str] | None, typer.Option(help="Option for each storage node.")
    ] = None,
) -> None:
    """Start a directory and storage nodes on this host, until Ctrl-C."""
    names = [*parse_nodes(nodes)]
    size_bytes = parse_bytes(store_bytes, "--store-bytes", serving.UNIT_BYTES)
    disk_bytes = parse_bytes(ssd_bytes, "--ssd-bytes")
    if disk_bytes and ssd_path is None:
        raise typer.BadParameter("--ssd-bytes needs --ssd-path, a folder on the SSD")
    place = (folder or own_folder()).resolve()
    longest_bytes = max(len(os.fsencode(name)) for name in (*names, "directory"))
    most_bytes = PATH_BYTES_MAX - 1 - longest_bytes
    if len(os.fsencode(place)) > most_bytes:
        raise typer.BadParameter(
            f"{place} is too long for the paths of sockets: name a folder of at most "
            f"{most_bytes} bytes with --folder"
        )
    store = serving.StoreProcesses(
        folder=place,
        nodes=names,
        dram_bytes=size_bytes,
        ssd_folder=ssd_path.resolve() if ssd_path else None,
        ssd_bytes=disk_bytes,
        directory_options=directory_option or [],
        node_options=node_option or [],
    )
    with shown_errors(), contextlib.suppress(Stopped), signals_as_exceptions():
        try:
            with console.status("starting directory and storage nodes ..."):
                store.start()
            console.print(f"ready: --directory {store.address}", soft_wrap=True)
            while True:
                for name in store.supervise():
                    console.print(f"{name} exited and was restarted")
                time.sleep(0.2)
        finally:
            ignore_signals()
            store.stop()


@app.command()
def stat(
    names: Annotated[
        list[str] | None, typer.Argument(help="Keys (32 hex digits) or names.")
    ] = None,
    directory: Directory = "",
    as_json: AsJson = False,
) -> None:
    """Show the usage of the store, or the locations of some blocks."""
    with shown_errors(), DirectoryClient(find_directory(directory)) as store:
        if not names:
            stats = store.stats()
            if as_json:
                console.file.write(json.dumps(asdict(stats)) + "\n")
                return
            console.print(_holders_table(stats))
            console.print(_totals_table(stats))
            return
        keys = [parse_key(name) for name in names]
        found = store.lookup(keys, "", 0.0, prefix_only=False)
        if as_json:
            rows = [[copy._asdict() for copy in copies] for copies in found]
            console.file.write(json.dumps(dict(zip(names, rows, strict=True))) + "\n")
        else:
            pairs = zip(keys, found, strict=True)
            console.print(_blocks_table((key, copy) for key, copies in pairs for copy in copies))
        if not all(found):
            missing = [name for name, copies in zip(names, found, strict=True) if not copies]
            errors.print(f"not in the store: {', '.join(missing)}", markup=False)
            sys.exit(1)


@app.command()
def ls(
    node: Annotated[str, typer.Option(help="Only this node and its blocks.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=65_536, help="Most blocks per node.")] = 100,
    directory: Directory = "",
) -> None:
    """List the storage nodes and their blocks."""
    with shown_errors(), DirectoryClient(find_directory(directory)) as store:
        infos = [info for info in store.nodes() if node in ("", info.node_id)]
        if node and not infos:
            raise StoreError(f"storage node {node} is not registered")
        console.print(_nodes_table(infos))
        found = [block for info in infos for block in store.blocks_on(info.node_id, limit)]
        if found:
            console.print(_blocks_table(found))


@app.command()
def put(
    name: Annotated[str, typer.Argument(help="Key (32 hex digits) or name.")],
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="File with its content.")
    ],
    node: Annotated[str, typer.Option(help="Storage node (default: chosen for the block).")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant whose quota the block counts for.")] = "",
    directory: Directory = "",
) -> None:
    """Store a file as one block."""
    content = np.fromfile(file, np.uint8)
    with shown_errors(), StoreClient(find_directory(directory), tenant=tenant) as store:
        if not store.put([parse_key(name)], [content], node)[0]:
            raise StoreError(f"{name} was not stored: no room, or the write timed out")
        copies = store.stat([parse_key(name)])[0]
        if not copies:
            raise StoreError(f"{name} was stored, but has already been evicted or removed")
        copy = copies[0]
        if copy.checksum != checksum(content):
            raise StoreError(f"{name} is stored with other content: remove it first")
    console.print(f"{parse_key(name).hex()} {copy.size_bytes} bytes on {copy.node_id}")


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="Key (32 hex digits) or name.")],
    file: Annotated[Path | None, typer.Argument(help="Target file (default: stdout).")] = None,
    directory: Directory = "",
) -> None:
    """Read one block, verify it, and write it to a file."""
    with shown_errors():
        with StoreClient(find_directory(directory)) as store:
            (content,) = store.get([parse_key(name)])
        if content is None:
            errors.print(f"not in the store: {name}, or no copy is readable now", markup=False)
            sys.exit(1)
        if file is None:
            sys.stdout.buffer.write(content.tobytes())
        else:
            content.tofile(file)


@app.command()
def remove(
    names: Annotated[list[str], typer.Argument(help="Keys (32 hex digits) or names.")],
    directory: Directory = "",
) -> None:
    """Remove all copies of some blocks."""
    with shown_errors(), DirectoryClient(find_directory(directory)) as store:
        done = store.remove([parse_key(name) for name in names])
    kept = [name for name, is_gone in zip(names, done, strict=True) if not is_gone]
    if kept:
        errors.print(f"not removed because in use, retry later: {', '.join(kept)}", markup=False)
        sys.exit(1)


@app.command()
def pin(
    names: Annotated[list[str], typer.Argument(help="Keys (32 hex digits) or names.")],
    kind: Annotated[
        str, typer.Option(help="soft (evicted last), hard (never evicted), none.")
    ] = "soft",
    ttl_s: Annotated[float, typer.Option(help="Duration of a soft pin, in seconds.")] = 1_800.0,
    directory: Directory = "",
) -> None:
    """Protect some blocks against eviction."""
    with shown_errors(), DirectoryClient(find_directory(directory)) as store:
        done = store.pin([parse_key(name) for name in names], kind, ttl_s)
    if not all(done):
        errors.print("some hard pins count as soft: too much memory is pinned", markup=False)
        sys.exit(1)


@app.command()
def quota(
    tenant: str,
    size: Annotated[str, typer.Argument(help="For example 10G; 0 removes the quota.")],
    directory: Directory = "",
) -> None:
    """Limit the bytes of a tenant over all nodes."""
    with shown_errors(), DirectoryClient(find_directory(directory)) as store:
        store.set_quota(tenant, parse_bytes(size))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Node to empty; its blocks move to other nodes.")],
    undo: Annotated[bool, typer.Option("--undo", help="Accept new blocks again.")] = False,
    deadline_s: Annotated[float, typer.Option(help="Stop after so many seconds.")] = 600.0,
    directory: Directory = "",
) -> None:
    """Move the blocks of a storage node to other nodes, so that it can be stopped without loss."""
    with shown_errors(), StoreClient(find_directory(directory)) as store:
        if undo:
            store.directory.drain(node, False)
            return
        with Progress(console=errors, transient=True) as progress:
            task = progress.add_task(f"draining {node}", total=None)

            def show(moved: int, left: int) -> None:
                progress.update(task, completed=moved, total=moved + left)

            left = store.replicas.drain(node, "drain", show, deadline_s)
    if left:
        errors.print(
            f"at least {left} blocks are only on {node}, because the other nodes have no room or "
            "cannot pull (no --control). Start another node, or stop this one and lose the blocks."
        )
        sys.exit(1)
    console.print(f"every block of {node} is on another node: {node} can be stopped")


@app.command()
def check(
    directory: Directory = "",
    node: Annotated[str, typer.Option(help="Blocks of this node only.")] = "",
) -> None:
    """Read and verify up to 65536 blocks in each node's DRAM, and remove corrupt copies."""
    read = bad = 0
    with (
        shown_errors(),
        StoreClient(find_directory(directory)) as store,
        Progress(console=errors, transient=True) as progress,
    ):
        if node and node not in {info.node_id for info in store.directory.nodes()}:
            raise StoreError(f"storage node {node} is not registered")
        for info in store.directory.nodes():
            if info.is_ssd or node not in ("", info.node_id):
                continue
            found = store.directory.blocks_on(info.node_id, 65_536)
            task = progress.add_task(f"checking {info.node_id}", total=len(found))
            for start in range(0, len(found), CHECKED_AT_ONCE):
                part = found[start : start + CHECKED_AT_ONCE]
                arrays = store.get([key for key, _ in part])
                for (key, _), array in zip(part, arrays, strict=True):
                    is_lost = array is None and store.exist([key]) == [False]
                    read, bad = read + 1, bad + is_lost
                progress.update(task, advance=len(part))
    console.print(f"{read} blocks read, {bad} corrupt or lost in the meantime")
    if bad:
        sys.exit(1)


# ---- tables


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _holders_table(stats: DirectoryStats) -> Table:
    """One row per holder (the DRAM or the SSD of a node)."""
    table = _table(
        "holders",
        ["node", "size", "used", "blocks", "writing", "quarantined", "idle", "evicted", ""],
    )
    for node in stats.nodes:
        state = "draining" if node.is_draining else "" if node.is_open else "sending its inventory"
        table.add_row(
            node.node_id,
            shown_bytes(node.segment_bytes),
            f"{100 * node.used_units / max(1, node.units):.1f} %",
            str(node.ready_blocks),
            str(node.writing_blocks),
            shown_bytes(node.quarantined_units * node.unit_bytes),
            str(node.idle_blocks),
            str(node.evictions),
            state,
        )
    return table


def _totals_table(stats: DirectoryStats) -> Table:
    """The directory's state, and its counters since the start of its epoch."""
    table = _table("directory", ["", ""])
    hit = stats.hit_blocks / stats.lookup_blocks if stats.lookup_blocks else 0.0
    lines = {
        "epoch": stats.epoch,
        "blocks": stats.blocks,
        "copies": stats.copies,
        "stored": shown_bytes(stats.used_bytes),
        "leases": stats.leases,
        "owners": stats.owners,
        "pinned keys": stats.pins,
        "workers": stats.workers,
        "blocks looked up": stats.lookup_blocks,
        "found": f"{100 * hit:.1f} %",
        "found on SSD only": stats.hit_ssd_blocks,
        "commits": stats.commits,
        "evictions": stats.evictions,
        "spills": stats.spills,
        "bad copies": stats.bad_copies,
    }
    for name, value in lines.items():
        table.add_row(name, str(value))
    for name, used, quota in stats.tenants:
        table.add_row(f"tenant {name}", f"{shown_bytes(used)} of {shown_bytes(quota)}")
    return table


def _blocks_table(found: Iterable[tuple[bytes, Copy]]) -> Table:
    """One row per copy."""
    table = _table("blocks", ["key", "node", "bytes", "checksum"])
    table.columns[0].no_wrap = True
    for key, copy in found:
        table.add_row(key.hex(), copy.node_id, str(copy.size_bytes), f"{copy.checksum:016x}")
    return table


def _nodes_table(infos: Sequence[NodeInfo]) -> Table:
    table = _table("storage nodes", ["node", "tier", "size", "rack", "reached by"])
    for info in infos:
        ways = ["mapped" if not info.is_ssd else "its node"]
        ways += ["NIXL"] * bool(info.agent_name) + ["TCP " + info.data_address] * bool(
            info.data_address
        )
        table.add_row(
            info.node_id,
            info.tier,
            shown_bytes(info.segment_bytes),
            info.rack or "-",
            ", ".join(ways),
        )
    return table


if __name__ == "__main__":
    app()
