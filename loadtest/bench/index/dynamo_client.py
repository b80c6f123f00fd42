"""NVIDIA Dynamo's RadixTree, measured as ours is. Runs in a Python that has its wheel.

Standard library and dynamo only: nothing of this project is installed there. Stores a trace
(indexes.py), prints what that took, then does one round for each line on its standard input:
`find_matches` and `.scores` for every request.

Not here: starting it, ours (lookups.py).
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HASHED_TOKENS = 131_072


def stored(tree: Any, events: list[tuple[int, int | None, list[int]]]) -> float:
    """Seconds. The events are written as JSON beforehand; reading it is part of its storing."""
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
    """Of find_matches and .scores; `best_ns` keeps the least of each request over all rounds."""
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


def main() -> None:
    from dynamo.llm import RadixTree, compute_block_hash_for_seq

    load = json.loads(Path(sys.argv[1]).read_text())
    requests, compared = load["requests"], int(sys.argv[2])
    tree = RadixTree()
    store_s = stored(tree, load["stored"])
    some = requests[:: max(1, len(requests) // compared)]
    answers = [
        [(worker, depth) for (worker, _), depth in tree.find_matches(ids, False).scores.items()]
        for ids in some
    ]  # fmt: skip
    first = {
        "version": version("ai-dynamo-runtime"), "store_s": store_s, "answers": answers,
        "hashing": hashing(compute_block_hash_for_seq),
    }  # fmt: skip
    print(json.dumps(first), flush=True)
    best_ns: list[int] = []
    for _ in sys.stdin:
        print(json.dumps(one_round(tree, requests, best_ns)), flush=True)


if __name__ == "__main__":
    main()
