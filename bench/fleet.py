"""The time from `kill -9` of the leading directory until a cached prefix is found again.

    python -m bench.fleet [--rounds 5]

A whole fleet runs on three network namespaces of this machine, which needs root. A prompt is
cached, and then the leader is killed. Every ASK_S the frontend of the other host gets a request
with that prefix, until a request finds its prefix cached. Earlier requests are rejected or computed
in full, and both are counted.

Not here: the fleet (harness/fleet/), blocks from host to host (cross_host.py), faults of every kind
(`python -m tests.chaos_serve`), several frontends (paper/experiments/frontends.py).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.harness.fleet import ServedFleet, why_no_namespaces
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import CannotMeasure
from mooncake_store.errors import StoreError

ASK_S = 0.1
PREFIX_TOKENS, TAIL_TOKENS = 512, 8
CACHED_TOKENS_MIN = 448
CHANGE_S_MAX, WHOLE_S_MAX = 60.0, 120.0
VOCABULARY = range(16, 2_048)


@dataclass(slots=True)
class LeaderChange:
    host: str  # of the killed leader
    found_s: float | None = None  # from the kill to the first token
    others: Counter[str] = field(default_factory=Counter)  # results of the requests before

    def row(self) -> dict[str, Cell]:
        others = ", ".join(f"{name} {count}" for name, count in sorted(self.others.items()))
        found_s = None if self.found_s is None else round(self.found_s, 3)
        return {"what": f"leader of {self.host} killed", "seconds": found_s, "others": others}


async def _one(fleet: ServedFleet, rng: random.Random) -> LeaderChange:
    assert fleet.directory is not None
    prefix = [rng.choice(VOCABULARY) for _ in range(PREFIX_TOKENS)]
    address = fleet.directory.leader().address
    (host,) = (name for name, each in fleet.hosts.items() if f"//{each.address}:" in address)
    (other, *_) = (name for name in fleet.frontends if name != host)
    async with TritonClient(fleet.frontends[other]) as client:
        give_up_s = time.monotonic() + CHANGE_S_MAX
        while not await _is_cached(client, prefix, rng):
            if time.monotonic() > give_up_s:
                raise CannotMeasure("a prompt that was just computed is not found in the store")
        change = LeaderChange(host)
        fleet.hosts[host].kill("directory")
        killed_s = time.monotonic()
        asked: list[asyncio.Task[None]] = []
        while change.found_s is None and time.monotonic() - killed_s < CHANGE_S_MAX:
            asked.append(asyncio.create_task(_ask(change, client, prefix, rng, killed_s)))
            await asyncio.sleep(ASK_S)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return change


async def _ask(
    change: LeaderChange,
    client: TritonClient,
    prefix: list[int],
    rng: random.Random,
    killed_s: float,
) -> None:
    try:
        cached_tokens = await _cached_tokens(client, prefix, rng)
    except ServerError as error:
        change.others[error.kind] += 1
        return
    if cached_tokens < CACHED_TOKENS_MIN:
        change.others["computed in full"] += 1
    elif change.found_s is None:
        change.found_s = time.monotonic() - killed_s


async def _is_cached(client: TritonClient, prefix: list[int], rng: random.Random) -> bool:
    try:
        return await _cached_tokens(client, prefix, rng) >= CACHED_TOKENS_MIN
    except ServerError:  # some processes have not found the last leader yet
        await asyncio.sleep(ASK_S)
        return False


async def _cached_tokens(client: TritonClient, prefix: list[int], rng: random.Random) -> int:
    tail = [rng.choice(VOCABULARY) for _ in range(TAIL_TOKENS)]
    request = GenerateRequest(
        request_id=f"leader-{rng.randrange(2**31)}",
        max_tokens=1,
        end_id=-1,
        input_ids=np.array([*prefix, *tail], np.int32),
    )
    cached_tokens = 0
    async for event in client.generate(request, CHANGE_S_MAX):
        cached_tokens = event.cached_tokens or cached_tokens
    return cached_tokens


def _wait_whole(fleet: ServedFleet) -> None:
    give_up_s = time.monotonic() + WHOLE_S_MAX
    while problems := list(filter(None, map(fleet.why_not_whole, fleet.hosts))):
        if time.monotonic() > give_up_s:
            raise CannotMeasure(f"the fleet does not recover: {'; '.join(problems)}")
        time.sleep(0.2)


def targets_of(changes: Sequence[LeaderChange]) -> list[Target]:
    found_s = [change.found_s for change in changes if change.found_s is not None]
    named = (("leader_change_s", statistics.median, 5.0), ("leader_change_s_worst", max, 8.0))
    if len(found_s) < len(changes):
        why = "after a kill the prefix was not found again in time; see the rows"
        return [Target(name, None, "<=", goal, why) for name, _, goal in named]
    return [Target(name, round(of(found_s), 3), "<=", goal) for name, of, goal in named]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Leaders that are killed.")] = 5,
    seed: FreshSeed = None,
) -> None:
    """Kill the leading directory of a fleet of three hosts; the last line is JSON."""
    seed = secrets.randbits(31) if seed is None else seed
    rng, changes = random.Random(seed), []
    with benchmark("fleet") as run, tempfile.TemporaryDirectory(prefix="mooncake-bench-") as name:
        if why := why_no_namespaces():
            raise CannotMeasure(why)
        console.print(f"--seed {seed}")
        try:
            with console.status("a fleet of three hosts ..."), ServedFleet(Path(name)) as fleet:
                for _ in range(rounds):
                    changes.append(asyncio.run(_one(fleet, rng)))
                    run.rows.append(changes[-1].row())
                    _wait_whole(fleet)
        except StoreError as error:
            raise CannotMeasure(str(error)) from error
        run.targets = targets_of(changes)


if __name__ == "__main__":
    typer.run(main)
