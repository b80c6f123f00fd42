"""NVIDIA Dynamo's RadixTree and SelectionService, measured as ours are, in a Python with its wheel.

It imports the standard library and dynamo only, because this project is not installed there. It
does one round for each line on its standard input.

    index LOAD.json COMPARED    stores a trace (indexes.py) and prints the time; a round is
                                `find_matches` and `.scores` for every request
    select LOAD.json            a line has the number of workers; a round is a new service, which
                                routes the requests before the timed ones, and then
                                `select_and_reserve` for each timed one. Its index learns from its
                                own choices. A prompt counts as computed at once, and the
                                last RESERVED requests stay reserved.

Not here: starting it, ours (lookups.py, decision.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HASHED_TOKENS = 131_072
BLOCK_TOKENS = 512  # of the trace
RESERVED = 64
MODEL = "m"


def stored(tree: Any, events: list[tuple[int, int | None, list[int]]]) -> float:
    """Seconds of storing. The events were written as JSON before; parsing it is part of storing."""
    prepared = []
    for number, (worker, parent, ids) in enumerate(events):
        blocks = [{"block_hash": block, "tokens_hash": block} for block in ids]
        data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        prepared.append((worker, json.dumps({"event_id": number, "data": data}).encode()))
    started_s = time.perf_counter()
    for worker, event in prepared:
        tree.apply_event(worker, event)
    return time.perf_counter() - started_s


def one_round(tree: Any, requests: list[list[int]], best_ns: list[int]) -> dict[str, float]:
    """Times of find_matches and .scores; `best_ns` keeps the least of each request over all
    rounds.
    """
    clock = time.perf_counter_ns
    find_ns, all_ns = [], []
    for ids in requests:
        began = clock()
        found = tree.find_matches(ids, False)
        middle = clock()
        found.scores  # noqa: B018  # a property that builds a dict
        end = clock()
        find_ns.append(middle - began)
        all_ns.append(end - began)
    best_ns[:] = map(min, all_ns, best_ns or all_ns)
    ordered = sorted(all_ns)
    return {
        "find_us": sum(find_ns) / len(find_ns) / 1e3,
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
        "mean_us": sum(ordered) / len(ordered) / 1e3,
        "best_us": sum(best_ns) / len(best_ns) / 1e3,
    }


def hashing(compute: Any) -> dict[str, float]:
    """Tokens per second from a list, by block size; the best of ten."""
    tokens, found = [(i * 7919) % 128_000 for i in range(HASHED_TOKENS)], {}
    for block_tokens in (64, 256, 512):
        best_s = float("inf")
        for _ in range(10):
            began_s = time.perf_counter()
            compute(tokens, block_tokens)
            best_s = min(best_s, time.perf_counter() - began_s)
        found[str(block_tokens)] = HASHED_TOKENS / best_s
    return found


async def selections(service: Any, requests: list[list[int]]) -> list[int]:
    """Nanoseconds of each."""
    clock, taken_ns = time.perf_counter_ns, []
    for number, ids in enumerate(requests):
        query = {
            "selection_id": f"r{number}",
            "model_name": MODEL,
            "block_hashes": ids,
            "sequence_hashes": ids,
            "isl_tokens": len(ids) * BLOCK_TOKENS,
        }
        began = clock()
        await service.select_and_reserve(query)
        taken_ns.append(clock() - began)
        await service.prefill_complete(f"r{number}")
        if number >= RESERVED:
            await service.free_reservation(f"r{number - RESERVED}")
    return taken_ns


async def selection_round(make: Any, workers: int, load: dict[str, Any]) -> dict[str, float]:
    service = make(indexer_threads=1)
    for number in range(workers):
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://w{number}:8000",
                "block_size": BLOCK_TOKENS,
                "total_kv_blocks": 16_384,
                "max_num_batched_tokens": 8_192,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
            }
        )
    taken_ns = await selections(service, load["before"] + load["timed"])
    service.shutdown()
    ordered = sorted(taken_ns[len(load["before"]) :])
    return {
        "p50_us": ordered[len(ordered) * 50 // 100] / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
    }


def serve_selections() -> None:
    from dynamo._core import SelectionService

    load = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps({"version": version("ai-dynamo-runtime")}), flush=True)
    for line in sys.stdin:
        found = asyncio.run(selection_round(SelectionService, int(line), load))
        print(json.dumps(found), flush=True)


def serve_index() -> None:
    from dynamo.llm import RadixTree, compute_block_hash_for_seq

    load = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    requests, compared = load["requests"], int(sys.argv[3])
    tree = RadixTree()
    store_s = stored(tree, load["stored"])
    some = requests[:: max(1, len(requests) // compared)]
    answers = [
        [(worker, depth) for (worker, _), depth in tree.find_matches(ids, False).scores.items()]
        for ids in some
    ]
    first = {
        "version": version("ai-dynamo-runtime"),
        "store_s": store_s,
        "answers": answers,
        "hashing": hashing(compute_block_hash_for_seq),
    }
    print(json.dumps(first), flush=True)
    best_ns: list[int] = []
    for _ in sys.stdin:
        print(json.dumps(one_round(tree, requests, best_ns)), flush=True)


if __name__ == "__main__":
    {"index": serve_index, "select": serve_selections}[sys.argv[1]]()
