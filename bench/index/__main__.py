"""The prefix index, hashing and whole decisions, timed beside NVIDIA Dynamo's.

    python -m bench.index --traces FOLDER [--peer-python PATH]

It runs on the conversation trace, at 8, 64 and 1,024 workers and two placements (indexes.py), all
in turns:

- a lookup and the scorer's form of its result, in our index, in `pydict`, and with --peer-python in
  Dynamo's RadixTree (its find_matches and .scores);
- memory per block;
- hashing prompts into block keys, from a numpy int32 array (a tokenizer's output in Triton) and
  from a list (whose integers are gathered one by one), beside blake2b alone on the same bytes;
- a decision of the real conductor from block keys to a booked route, at 32 (64 in all), 64 and
  1,024 workers of each role, in turns with select_and_reserve of Dynamo's SelectionService.

PATH is a Python with Dynamo's wheel: python3 -m venv /tmp/dynamo, then /tmp/dynamo/bin/pip install
ai-dynamo-runtime==1.6.1.

Not here: the measurements (indexes.py, lookups.py, decision.py).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.index import decision
from bench.index.indexes import IndexedTrace, memory_per_block, placed, requests_of
from bench.index.lookups import BYTES, IDS, Contender, DynamoIndex, LookupTimes, contenders
from conductor.routing.policies import POLICIES
from loadtest.harness.benchmark import benchmark, best_s, console, in_turns, timed_s
from loadtest.harness.result import Cell, Target
from loadtest.replay.trace import read_trace
from mooncake_store.block_keys import KEY_BYTES, TOKEN_BYTES, Tokens, block_keys, chain_seed

PLACEMENTS = ("rr", "rep4")
OVER_PYDICT = {8: 2.0, 64: 2.5, 1024: 5.0}  # by workers
OVER_DYNAMO = {8: 3.0, 64: 3.0, 1024: 5.0}
# By workers of each role. "64 workers" can be read in two ways, so there are rows for both.
DECISION_P50_US = {32: ("64_in_all", 60.0), 64: ("64", 60.0), 1024: ("1024", 250.0)}
WITH_PEER = (64, 1024)  # workers of each role of ours; Dynamo gets the same number
P99_OVER_P50, BYTES_PER_BLOCK = 4.0, 150.0
PROMPTS_TOKENS, BLOCKS_TOKENS, PROMISED_BLOCKS_TOKENS = (8_192, 131_072), (64, 256, 512), (256, 512)
HASHED_TOKENS_PER_S = 80e6
DECISION_OVER_DYNAMO, HASHING_OVER_BLAKE2B = 0.5, 0.6
PIECE_TOKENS = 1_024 // TOKEN_BYTES
Rows = list[dict[str, Cell]]


def lookups(
    load: IndexedTrace, peer_python: Path | None, rounds: int
) -> tuple[list[LookupTimes], Rows]:
    """All indexes with this load, in turns; RuntimeError when their answers differ. Dynamo's
    hashing is measured here too, since its process is running."""
    made = contenders(load)
    hash_rows: Rows = []
    with contextlib.ExitStack() as stack:
        peers = [DynamoIndex(stack, peer_python, load)] if peer_python else []
        if peers and peers[0].answers() != made[0].answers():
            raise RuntimeError("Dynamo's index finds other prefixes than ours")
        turns: list[Contender | DynamoIndex] = [*made, *peers]
        for _ in range(rounds):
            for one in turns:
                one.round()
        if peers:
            name = f"list, Dynamo {peers[0].version}"
            hash_rows = [
                hashing_row(name, 131_072, int(block_tokens), rate)
                for block_tokens, rate in peers[0].hashing.items()
            ]
    return [one.measured for one in turns], hash_rows


def lookup_rows(
    loads: Sequence[IndexedTrace], peer_python: Path | None, rounds: int
) -> tuple[Rows, list[Target]]:
    rows: Rows = []
    by_load: dict[tuple[str, int], list[LookupTimes]] = {}
    for load in loads:
        with console.status(f"lookups, {load.placement}, {load.workers} workers ..."):
            measured, hash_rows = lookups(load, peer_python, rounds)
        by_load[load.placement, load.workers] = measured
        rows += [lookup_row(load, one) for one in measured]
    return rows + hash_rows, lookup_targets(by_load)


def lookup_row(load: IndexedTrace, one: LookupTimes) -> dict[str, Cell]:
    return {
        "what": "lookup",
        "index": one.index,
        "keys": one.keys,
        "placement": load.placement,
        "workers": load.workers,
        "store_blocks_per_s": round(one.store_blocks_per_s),
        "find_us": round(one.median("find_us"), 2),
        "p50_us": round(one.median("p50_us"), 2),
        "p99_us": round(one.median("p99_us"), 2),
        "mean_us": round(one.median("mean_us"), 2),
        "best_us": round(one.best_us, 2),
    }


def lookup_targets(by_load: dict[tuple[str, int], list[LookupTimes]]) -> list[Target]:
    """The targets, for the placement in which we lead by least.

    They are for the block keys of Dynamo's first measurement: the trace's ids. The values with
    16-byte keys (against pydict with the same, against Dynamo with its ids) are in `why`.
    """
    found = []
    for peer, goals in (("pydict", OVER_PYDICT), ("dynamo", OVER_DYNAMO)):
        for workers, goal in goals.items():
            these = [
                measured
                for (_, count), measured in by_load.items()
                if count == workers and any(one.index == peer for one in measured)
            ]
            value, why = None, "not measured here"
            if these:
                value = round(min(_ratio(each, peer, IDS, IDS) for each in these), 2)
                theirs = BYTES if peer == "pydict" else IDS
                other = min(_ratio(each, peer, theirs, BYTES) for each in these)
                why = f"{other:.2f} with 16-byte keys"
            found.append(Target(f"find_over_{peer}_{workers}", value, ">=", goal, why))
    return found


def _ratio(measured: Sequence[LookupTimes], peer: str, their_keys: str, our_keys: str) -> float:
    best_us = {(one.index, one.keys): one.best_us for one in measured}
    return best_us[peer, their_keys] / best_us["ours", our_keys]


def memory_rows(loads: Sequence[IndexedTrace]) -> tuple[Rows, list[Target]]:
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for load in loads:
            for way in ("ours", "pydict"):
                found = memory_per_block(load, way, Path(folder))
                rows.append(
                    {
                        "what": "memory",
                        "index": way,
                        "keys": "16 bytes",
                        "placement": load.placement,
                        "workers": load.workers,
                        "blocks": load.keys,
                        "copies": load.blocks,
                        **{f"{name}_per_block": round(value, 1) for name, value in found.items()},
                    }
                )
    worst = max(float(row["rss_bytes_per_block"] or 0) for row in rows if row["index"] == "ours")
    why = "resident set, per different block with its key; the worst placement"
    return rows, [Target("rss_bytes_per_block", worst, "<=", BYTES_PER_BLOCK, why)]


def hashing_rows(rounds: int, seed: int) -> tuple[Rows, list[Target]]:
    rows: Rows = []
    seed_key = chain_seed("bench")
    worst: dict[int, float] = {}
    for prompt_tokens in PROMPTS_TOKENS:
        array = np.random.default_rng(seed).integers(0, 128_000, prompt_tokens, np.int32)
        inputs: dict[str, Tokens] = {"int32 array": array, "list": array.tolist()}
        for block_tokens in BLOCKS_TOKENS:
            for name, tokens in inputs.items():
                hashing = partial(block_keys, tokens, block_tokens, seed_key)
                rate = prompt_tokens / best_s(hashing, rounds)
                rows.append(hashing_row(name, prompt_tokens, block_tokens, rate))
                if name == "int32 array":
                    worst[block_tokens] = min(worst.get(block_tokens, rate), rate)
    targets = [
        Target(
            f"hashing_tokens_per_s_{block_tokens}",
            round(worst[block_tokens]),
            ">=",
            HASHED_TOKENS_PER_S,
            "from a numpy int32 array, the slower of two prompt lengths",
        )
        for block_tokens in PROMISED_BLOCKS_TOKENS
    ]
    beside_rows, beside = beside_blake2b(rounds, seed)
    return rows + beside_rows, [*targets, beside]


def hashing_row(
    name: str, prompt_tokens: int, block_tokens: int, tokens_per_s: float
) -> dict[str, Cell]:
    return {
        "what": "hashing",
        "input": name,
        "prompt_tokens": prompt_tokens,
        "block_tokens": block_tokens,
        "million_tokens_per_s": round(tokens_per_s / 1e6, 1),
    }


def beside_blake2b(rounds: int, seed: int) -> tuple[Rows, Target]:
    """Block keys of blocks of 1 KiB, from tokens, in turns with keyed blake2b of pieces that were
    cut and packed before."""
    rows, ratios, seed_key = [], [], chain_seed("bench")
    for prompt_tokens in PROMPTS_TOKENS:
        array = np.random.default_rng(seed).integers(0, 128_000, prompt_tokens, np.int32)
        packed = array.tobytes()
        step_bytes = PIECE_TOKENS * TOKEN_BYTES
        pieces = [packed[at : at + step_bytes] for at in range(0, len(packed), step_bytes)]
        ways: dict[str, Callable[[], object]] = {
            "int32 array": partial(block_keys, array, PIECE_TOKENS, seed_key),
            "list": partial(block_keys, array.tolist(), PIECE_TOKENS, seed_key),
            "blake2b alone": partial(hashed, pieces, seed_key),
        }
        turns = {name: partial(timed_s, way) for name, way in ways.items()}
        best = {name: min(seconds) for name, seconds in in_turns(turns, rounds).items()}
        blake2b_s = best["blake2b alone"]
        ratios.append(blake2b_s / best["int32 array"])
        rows += [
            hashing_row(name, prompt_tokens, PIECE_TOKENS, prompt_tokens / seconds)
            | {"over_blake2b": round(blake2b_s / seconds, 2)}
            for name, seconds in best.items()
        ]
    why = "blocks of 1 KiB from a numpy int32 array, the slower of two prompt lengths"
    ratio = round(min(ratios), 2)
    return rows, Target("hashing_over_blake2b", ratio, ">=", HASHING_OVER_BLAKE2B, why)


def hashed(pieces: Sequence[bytes], key: bytes) -> list[bytes]:
    return [blake2b(piece, key=key, digest_size=KEY_BYTES).digest() for piece in pieces]


def decision_rows(
    trace: Path,
    sizes: Sequence[int],
    policies: Sequence[str],
    rounds: int,
    decisions: int,
    peer_python: Path | None,
) -> tuple[Rows, list[Target]]:
    rows, requests = [], read_trace(trace)
    targets: list[Target] = []
    with contextlib.ExitStack() as stack:
        peer = None
        if peer_python:
            peer = decision.DynamoSelections(stack, peer_python, requests, decisions)
        for workers in sizes:
            ours = [decision.OurDecisions(requests, workers, one, decisions) for one in policies]
            with console.status(f"decisions, {workers} workers of each role ..."):
                for _ in range(rounds):
                    for one in ours:
                        one.round()
                    if peer is not None:
                        peer.round(workers)
            these = [one.row() for one in ours]
            theirs = peer.row(workers) if peer is not None else None
            rows += [*these, *([theirs] if theirs else [])]
            if workers in DECISION_P50_US:
                targets += decision_targets(workers, these, theirs)
    return rows, targets


def decision_targets(
    workers: int, ours: Sequence[dict[str, Cell]], theirs: dict[str, Cell] | None
) -> list[Target]:
    name, goal = DECISION_P50_US[workers]
    slowest = max(ours, key=lambda row: float(row["p50_us"] or 0))
    p50_us = float(slowest["p50_us"] or 0)
    why = (
        f"{slowest['policy']}, the slowest; CPU time p50 {slowest['cpu_p50_us']}, "
        f"p99 {slowest['cpu_p99_us']} us"
    )
    over = max(float(row["p99_over_p50"] or 0) for row in ours)
    targets = [
        Target(f"decision_us_p50_{name}", p50_us, "<=", goal, why),
        Target(f"decision_p99_over_p50_{name}", over, "<=", P99_OVER_P50, why),
    ]
    if workers in WITH_PEER:
        ratio, why = None, "no --peer-python was given"
        if theirs is not None:
            their_us = float(theirs["p50_us"] or 0)
            ratio, why = round(p50_us / their_us, 2), f"p50 {p50_us} beside {their_us} us"
        over_dynamo = f"decision_over_dynamo_{name}"
        targets.append(Target(over_dynamo, ratio, "<=", DECISION_OVER_DYNAMO, why))
    return targets


class IndexPart(str, Enum):
    LOOKUPS = "lookups"
    MEMORY = "memory"
    HASHING = "hashing"
    DECISIONS = "decisions"


def main(
    traces: Annotated[
        Path, typer.Option(envvar="MOONCAKE_TRACES", help="Folder with conversation_trace.jsonl.")
    ],
    peer_python: Annotated[
        Path | None, typer.Option(help="A Python that has Dynamo's wheel, to measure it too.")
    ] = None,
    only: Annotated[
        list[IndexPart] | None, typer.Option(help="Only this part; repeatable.")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of workers; repeatable.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Decisions of this one ({', '.join(POLICIES)}); repeatable."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=100, help="Number of the trace's first requests.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of lookups; a third for decisions.")
    ] = 9,
    decisions: Annotated[int, typer.Option(min=10, help="Decisions in each round.")] = 3_000,
    seed: Annotated[int, typer.Option(help="Seed of the hashed tokens.")] = 1,
) -> None:
    """Measure; the last line is JSON."""
    trace, parts = traces / "conversation_trace.jsonl", only or list(IndexPart)
    found: list[tuple[Rows, list[Target]]] = []
    with benchmark("index") as run:
        prompts, loads = requests_of(trace, requests), []
        if {IndexPart.LOOKUPS, IndexPart.MEMORY} & set(parts):
            loads = [
                placed(prompts, placement, count)
                for placement in PLACEMENTS
                for count in workers or OVER_PYDICT
            ]
        if IndexPart.LOOKUPS in parts:
            found.append(lookup_rows(loads, peer_python, rounds))
        if IndexPart.MEMORY in parts:
            with console.status("memory ..."):
                found.append(memory_rows(loads))
        if IndexPart.HASHING in parts:
            found.append(hashing_rows(rounds * 3, seed))
        if IndexPart.DECISIONS in parts:
            found.append(
                decision_rows(
                    trace,
                    workers or list(DECISION_P50_US),
                    policy or ["kvcache_centric", "adaptive"],
                    max(1, rounds // 3),
                    decisions,
                    peer_python,
                )
            )
        run.rows = [row for rows, _ in found for row in rows]
        run.targets = [target for _, targets in found for target in targets]


if __name__ == "__main__":
    typer.run(main)
