"""The gain of huge pages: one segment in each of the given folders, read at random.

    mount -t tmpfs -o size=2g,huge=advise none /mnt/huge
    python -m bench.segment_pages /dev/shm /mnt/huge

`mapped` copies random blocks out of a second mapping of the segment, as a worker of the same node
does; `cma` lets the kernel copy them (process_vm_readv), as NIXL does between processes of one
host.

Not here: the server, RDMA (whose cards have page tables of their own).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from loadtest.harness.benchmark import benchmark, median_s, moved, timed_s
from loadtest.harness.result import Cell
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.segment import Segment

BATCHES = ((4096, 1024), (64 * 1024, 64), (2**20, 16))
_libc = ctypes.CDLL(None, use_errno=True)


class IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class FolderSegment:
    """A segment in one folder, mapped twice: by its owner and by a guest."""

    def __init__(self, stack: ExitStack, folder: Path, size_bytes: int) -> None:
        path = str(folder / f"mooncake-bench-{os.getpid()}-{secrets.token_hex(3)}")
        started_s = time.perf_counter()
        self.own = stack.enter_context(Segment.create(path, size_bytes))
        self.create_s = time.perf_counter() - started_s
        self.guest = stack.enter_context(Segment.open(path))
        self.own.view[:] = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
        self.folder = folder

    def mapped(self, starts: list[int], block_bytes: int, target: ByteArray) -> None:
        view = self.guest.view
        for at, start in enumerate(starts):
            target[at * block_bytes : (at + 1) * block_bytes] = view[start : start + block_bytes]

    def cma(self, starts: list[int], block_bytes: int, target: ByteArray) -> None:
        total_bytes = block_bytes * len(starts)
        local = (IoVector * 1)(IoVector(target.ctypes.data, total_bytes))
        there = (IoVector * len(starts))(
            *[IoVector(self.own.address + start, block_bytes) for start in starts]
        )
        moved = _libc.process_vm_readv(os.getpid(), local, 1, there, len(starts), 0)
        assert moved == total_bytes, os.strerror(ctypes.get_errno())


def read_s(
    subject: FolderSegment,
    way: str,
    block_bytes: int,
    starts: Iterator[list[int]],
    target: ByteArray,
) -> float:
    chosen = next(starts)
    return timed_s(lambda: getattr(subject, way)(chosen, block_bytes, target))


def measure(subjects: list[FolderSegment], size_bytes: int, rounds: int) -> list[dict[str, Cell]]:
    rng, target = np.random.default_rng(2), np.zeros(16 * 2**20, np.uint8)
    rows: list[dict[str, Cell]] = []
    for block_bytes, blocks in BATCHES:
        # All folders and ways read the same blocks in a round.
        starts = [
            (rng.choice(size_bytes // block_bytes, blocks, replace=False) * block_bytes).tolist()
            for _ in range(rounds)
        ]
        turns = {
            (at, way): partial(read_s, subject, way, block_bytes, iter(starts), target)
            for at, subject in enumerate(subjects)
            for way in ("mapped", "cma")
        }
        rows += [
            {
                "folder": str(subjects[at].folder),
                "pages": subjects[at].own.pages,
                "create_s": round(subjects[at].create_s, 3),
                "way": way,
                "block_bytes": block_bytes,
                "gb_per_s": moved(block_bytes, blocks, seconds)["gb_per_s"],
            }
            for (at, way), seconds in median_s(turns, rounds).items()
        ]
    return rows


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders on tmpfs or a hugetlbfs.")],
    segment_mib: Annotated[int, typer.Option(min=16)] = 1024,
    rounds: Annotated[int, typer.Option(min=5)] = 40,
) -> None:
    """Compare the pages of segments in these folders; the last line is JSON."""
    size_bytes = segment_mib * 2**20
    with benchmark("segment_pages") as run, ExitStack() as stack:
        subjects = [FolderSegment(stack, folder, size_bytes) for folder in folders]
        run.rows = measure(subjects, size_bytes, rounds)


if __name__ == "__main__":
    typer.run(main)
