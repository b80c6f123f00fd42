"""The time from `kill -9` of the leading directory until a cached prefix is found again.

A whole fleet runs. A prompt is cached; then the leader is killed, and every ASK_S a request with
that prefix is sent to the frontend of the other host, until one has its prefix cached. Earlier
requests are rejected or computed in full, which is counted too.

Not here: the other costs of a fleet (__main__.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from bench.harness.fleet import ServedFleet
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.triton_client import TritonClient
from loadtest.harness.result import Cell
from loadtest.harness.server import CannotMeasure

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


def leader_changes(fleet: ServedFleet, rounds: int, seed: int) -> list[LeaderChange]:
    rng = random.Random(seed)
    found = []
    for _ in range(rounds):
        found.append(asyncio.run(_one(fleet, rng)))
        _wait_whole(fleet)
    return found


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
