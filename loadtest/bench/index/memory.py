"""Memory of an index per cached block, in a process of its own.

    python -m loadtest.bench.index.memory LOAD.npz WAY        one JSON object

WAY is ours or pydict; keys are 16 bytes. `rss_bytes` is how much the resident set has grown once
everything is stored: the index with the keys that it keeps, and what the allocator wastes; free
memory is given back to the system before each look, or the figure would depend on what was there
before. `counted_bytes` is the same by sys.getsizeof, without the waste.

Per block means per different block, however many workers have it.

Not here: what was stored (placement.py).
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from loadtest.bench.index.indexes import Index, Ours, PyDict
from loadtest.bench.index.placement import Load, block_key
from mooncake_store.prefix_index.prefix_index import PrefixIndex


def measured(load: Load, way: str, folder: Path) -> dict[str, float]:
    """rss_bytes and counted_bytes per block."""
    path = folder / "load.npz"
    np.savez(
        path,
        workers=np.array([worker for worker, _, _ in load.stored]),
        lengths=np.array([len(ids) for _, _, ids in load.stored]),
        ids=np.concatenate([ids for _, _, ids in load.stored]),
    )
    command = [sys.executable, "-m", "loadtest.bench.index.memory", str(path), way]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def resident_bytes() -> int:
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


def distinct(index: PrefixIndex) -> Iterator[object]:
    """Every object that the index keeps for its keys, once."""
    yield index._bitmaps
    yield from index._bitmaps
    yield from {id(bitmap): bitmap for bitmap in index._bitmaps.values()}.values()
    yield from index._pages._pages


def main() -> None:
    index: Index = PyDict() if sys.argv[2] == "pydict" else Ours()
    with np.load(sys.argv[1]) as file:
        workers, lengths, ids = (file[name] for name in ("workers", "lengths", "ids"))
    keys, starts = len(np.unique(ids)), np.cumsum(lengths) - lengths
    before_bytes = resident_bytes()
    for worker, start, length in zip(workers, starts, lengths, strict=True):
        new = [block_key(int(block)) for block in ids[start : start + length]]
        index.store(int(worker), new)
    found = {"rss_bytes": (resident_bytes() - before_bytes) / keys}
    if isinstance(index, Ours):
        counted = sum(sys.getsizeof(each) for each in distinct(index.index))
        found["counted_bytes"] = counted / keys
    print(json.dumps(found))


if __name__ == "__main__":
    main()
