"""What huge pages are worth: one segment in each of some folders, read at random.

    mount -t tmpfs -o size=2g,huge=advise none /mnt/huge
    python -m loadtest.bench.segment_pages /dev/shm /mnt/huge

`mapped` copies random blocks out of a second mapping of the segment, as a worker of the same node
does; `cma` asks the kernel for them (process_vm_readv), as NIXL does between processes of one host.
Folders take turns in every round.

Not here: the server around it, RDMA (whose cards have page tables of their own).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from loadtest.bench.result import Cell, Result
from mooncake_store.memory.segment import ByteArray, Segment

BATCHES = ((4096, 1024), (64 * 1024, 64), (2**20, 16))
_libc = ctypes.CDLL(None, use_errno=True)


class Place(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Subject:
    """A segment in one folder, mapped twice: by its owner and as a guest does it."""

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
        local = (Place * 1)(Place(target.ctypes.data, total_bytes))
        there = (Place * len(starts))(
            *[Place(self.own.address + start, block_bytes) for start in starts]
        )
        moved = _libc.process_vm_readv(os.getpid(), local, 1, there, len(starts), 0)
        assert moved == total_bytes, os.strerror(ctypes.get_errno())


def measure(subjects: list[Subject], size_bytes: int, rounds: int) -> list[dict[str, Cell]]:
    chance, target = np.random.default_rng(2), np.zeros(16 * 2**20, np.uint8)
    rows: list[dict[str, Cell]] = []
    for block_bytes, blocks in BATCHES:
        seconds: dict[tuple[int, str], list[float]] = {}
        for _ in range(rounds):
            chosen = chance.choice(size_bytes // block_bytes, blocks, replace=False)
            starts = (chosen * block_bytes).tolist()
            for at, subject in enumerate(subjects):
                for way in ("mapped", "cma"):
                    started_s = time.perf_counter()
                    getattr(subject, way)(starts, block_bytes, target)
                    took_s = time.perf_counter() - started_s
                    seconds.setdefault((at, way), []).append(took_s)
        rows += [
            {
                "folder": str(subjects[at].folder),
                "pages": subjects[at].own.pages,
                "create_s": round(subjects[at].create_s, 3),
                "way": way,
                "block_bytes": block_bytes,
                "gb_per_s": round(block_bytes * blocks / statistics.median(found) / 1e9, 3),
            }
            for (at, way), found in seconds.items()
        ]
    return rows


def main(
    folders: Annotated[list[Path], typer.Argument(help="On tmpfs or a hugetlbfs.")],
    segment_mib: Annotated[int, typer.Option(min=16)] = 1024,
    rounds: Annotated[int, typer.Option(min=5)] = 40,
) -> None:
    """Compare the pages of segments in these folders; the last line is JSON."""
    started_s, size_bytes = time.monotonic(), segment_mib * 2**20
    with ExitStack() as stack:
        subjects = [Subject(stack, folder, size_bytes) for folder in folders]
        rows = measure(subjects, size_bytes, rounds)
    Result("segment_pages", time.monotonic() - started_s, rows, []).print(Console(highlight=False))


if __name__ == "__main__":
    typer.run(main)
