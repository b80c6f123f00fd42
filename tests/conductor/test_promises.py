"""What holds whatever comes: idle clusters admit, prefixes and budgets are not overdrawn, and the
columns choose as a walk over plain numbers does."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from conductor import Candidate, Conductor, ConductorConfig, Route
from conductor.config import ADMISSIONS
from conductor.routing.fetching import EVICTION_COST_SHARE
from conductor.routing.policies import POLICIES
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeUp,
    WorkerReported,
    WorkerUp,
)
from tests.conductor.fleet import BLOCK_TOKENS, conductor, keys, node, prompt, report, worker

NODES = ("s0", "s1", "s2")
HOLDERS = (*NODES, "s0/ssd", "s1/ssd")
CHAINS = [keys(f"{name}*12") for name in "abc"]
RATE, LATENCY_S = 1e9, 0.001


class Blocks:
    """Which holder has which block, reported to a conductor as it changes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.held = rng, {holder: set[bytes]() for holder in HOLDERS}
        self.full = set[str]()  # a block left them

    def change(self, made: Conductor, now_s: float) -> None:
        holder, chain = self.rng.choice(HOLDERS), self.rng.choice(CHAINS)
        start, end = sorted((self.rng.randint(0, 12), self.rng.randint(0, 12)))
        if self.rng.random() < 0.7:
            self.held[holder] |= set(chain[start:end])
            events: list[Event] = [BlockAdded(key, holder) for key in chain[start:end]]
        else:
            self.held[holder] -= set(chain[start:end])
            events = [BlockRemoved(key, holder) for key in chain[start:end]]
            self.full |= {holder} if events else set()
        made.on_events(events, now_s)

    def run(self, node_id: str, chain: list[bytes]) -> int:
        """Leading blocks that the node has in either tier."""
        both = self.held[node_id] | self.held.get(f"{node_id}/ssd", set())
        return next((n for n, key in enumerate(chain) if key not in both), len(chain))


def fleet(rng: random.Random, count: int, **changes: object) -> list[Event]:
    """Workers of different speed, one of a role on each node; two nodes have an SSD."""
    found: list[Event] = [NodeUp(node(holder)) for holder in HOLDERS]
    for role in ("prefill", "decode"):
        for number in range(count):
            info = worker(
                f"{role[0]}{number}",
                role,
                NODES[number % 3],
                slots_max=99,
                prefill_coefficients=(0.01, rng.uniform(1e-4, 1e-3), rng.uniform(0, 1e-7)),
                transfer_bytes_per_s=dict.fromkeys(NODES, RATE),
                transfer_latency_s=dict.fromkeys(NODES, LATENCY_S),
            )
            found.append(WorkerUp(replace(info, **changes)))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_cluster_admits_whatever_its_workers_can_hold(
    seed: int, policy: str, admission: str
) -> None:
    rng = random.Random(seed)
    made = conductor(
        fleet(rng, 3), policy=policy, admission=admission, ttft_slo_s=0.5, tbt_slo_s=0.001
    )
    for number in range(60):
        now_s, tokens = number * 1.0, rng.choice((1, 64, 700, 20_000, 99_000))
        names = [f"{role}{n}" for role in "pd" for n in range(3)]
        made.on_events([WorkerReported(report(name)) for name in names], now_s)
        made.on_tick(now_s)
        asked = prompt(f"r{number}", prompt_tokens=tokens, output=rng.randint(0, 999))
        assert isinstance(made.on_request(asked, now_s), Route)
        if rng.random() < 0.8:
            made.on_prefill_finished(asked.request_id, now_s + 0.4, 0, rng.choice((0.4, None)))
        made.on_finished(asked.request_id, now_s + 0.5)


@pytest.mark.parametrize("policy", ["adaptive", "kvcache_centric", "cache_aware"])
def test_a_prefix_is_never_overcounted(seed: int, policy: str) -> None:
    rng, fetches, restores = random.Random(seed), 0, 0
    # Nobody computes on s2, so what is there must be fetched.
    made, blocks = conductor(fleet(rng, 2), policy=policy, report_s_max=1e9), Blocks(rng)
    for number in range(600):
        now_s = number * 0.5
        blocks.change(made, now_s)
        chain = rng.choice(CHAINS)[: rng.randint(0, 12)]
        tokens = len(chain) * BLOCK_TOKENS + rng.randint(0, 63) or 1
        asked = replace(prompt(f"r{number}", prompt_tokens=tokens), block_keys=chain)
        found = made.on_request(asked, now_s)
        assert isinstance(found, Route)
        local = blocks.run(found.prefill.node_id, chain)
        assert found.local_blocks <= local and found.cached_tokens < tokens
        in_dram = set(chain[: found.local_blocks - found.restore_blocks])
        assert in_dram <= blocks.held[found.prefill.node_id]
        whole = found.local_blocks + found.fetch_blocks
        assert found.cached_tokens <= whole * BLOCK_TOKENS
        if found.fetch_node is not None:
            fetches += 1
            assert whole <= blocks.run(found.fetch_node, chain)
        restores += found.restore_blocks > 0
        made.on_prefill_finished(f"r{number}", now_s + 0.1, found.cached_tokens)
        made.on_finished(f"r{number}", now_s + 0.2)
    assert restores and (fetches or policy == "cache_aware"), "too dull to prove anything"


def test_no_budget_is_exceeded(seed: int) -> None:
    """Copies per tick and under way, places in a queue, slots and pages of a batch. Of several
    fleets, because where prompts are computed quickly nothing deserves a copy."""
    rng = random.Random(seed)
    walks = [walk_within_budgets(rng) for _ in range(4)]
    assert all(rejected for rejected, _ in walks) and any(copied for _, copied in walks), walks


def walk_within_budgets(rng: random.Random) -> tuple[int, int]:
    """(requests that were rejected, suggestions of copies)"""
    config = ConductorConfig(
        hot_hits_per_s=0.05,
        hot_blocks_per_tick_max=5,
        hot_blocks_in_flight_max=9,
        hot_target_blocks_max=6,
        report_s_max=1e9,
        request_s_max=1e9,
        ttft_slo_s=1e9,
        tbt_slo_s=1e9,
    )
    made, blocks = Conductor(config), Blocks(rng)
    made.on_events(fleet(rng, 3, slots_max=4, pages_max=60), 0.0)
    live: dict[str, Route] = {}
    decoding: set[str] = set()
    under_way: dict[tuple[str, bytes], float] = {}
    rejected = copied = 0
    for number in range(400):
        now_s = number * 0.2
        if number % 10 == 0:
            blocks.change(made, now_s)
            said = made.on_tick(now_s)
            copied += len(said)
            assert sum(len(s.block_keys) for s in said) <= config.hot_blocks_per_tick_max
            until_s = now_s + config.replicate_s_max
            under_way = {key: end_s for key, end_s in under_way.items() if end_s > now_s}
            under_way |= {(s.target_node, key): until_s for s in said for key in s.block_keys}
            under_way = {
                (target, key): end_s
                for (target, key), end_s in under_way.items()
                if key not in blocks.held[target]
            }
            assert len(under_way) <= config.hot_blocks_in_flight_max
            assert max(Counter(t for t, _ in under_way).values(), default=0) <= 6
        chain = rng.choice(CHAINS)[: rng.randint(1, 12)]
        tokens = len(chain) * BLOCK_TOKENS
        asked = replace(prompt(f"r{number}", prompt_tokens=tokens), block_keys=chain)
        found = made.on_request(asked, now_s)
        if isinstance(found, Route):
            live[asked.request_id] = found
        rejected += not isinstance(found, Route)
        queued = Counter(r.prefill.worker_id for n, r in live.items() if n not in decoding)
        batched = Counter(route.decode.worker_id for route in live.values())
        assert max(queued.values(), default=0) <= 4 and max(batched.values(), default=0) <= 4
        if rng.random() < 0.7 and live:
            name = rng.choice(list(live))
            if name in decoding:
                made.on_finished(name, now_s)
                decoding.remove(name)
                del live[name]
            else:
                made.on_prefill_finished(name, now_s, 0)
                decoding.add(name)
    made.check()
    return rejected, copied


def best_start_s(
    made: Conductor, blocks: Blocks, chain: list[bytes], candidate: Candidate, by_times: bool
) -> tuple[float, float]:
    """(transfer, prefill) at this candidate's worker: every source tried, in plain numbers."""
    info = made._cluster.workers[(candidate.prefill.worker_id, "w1")].info
    base_s, token_s, pair_s = info.prefill_coefficients
    ssd, size = made.config.ssd_bytes_per_s, info.block_bytes
    tokens = len(chain) * BLOCK_TOKENS + 1

    def plan(dram: int, whole: int, source_dram: int, depth: int) -> tuple[float, float]:
        new, cached = tokens - depth * BLOCK_TOKENS, depth * BLOCK_TOKENS
        prefill_s = base_s + token_s * new + pair_s * new * (cached + new / 2)
        move_s = (whole - dram) * size / ssd
        if depth > whole:
            slow = min(depth - whole, max(0, depth - source_dram))
            move_s += (
                LATENCY_S + (depth - whole - slow) * size / RATE + slow * size / min(RATE, ssd)
            )
        return move_s, prefill_s

    def runs(node_id: str) -> tuple[int, int]:
        held, more = blocks.held[node_id], blocks.held.get(f"{node_id}/ssd", set())
        dram = next((n for n, key in enumerate(chain) if key not in held), len(chain))
        rest = chain[dram:]
        return dram, dram + next((n for n, key in enumerate(rest) if key not in more), len(rest))

    own_dram, own = runs(candidate.prefill.node_id)
    compute = plan(own_dram, own, 0, own)
    others = [runs(node_id) for node_id in NODES if node_id != candidate.prefill.node_id]
    longest = max(own, *(whole for _, whole in others))
    found = [compute]
    for dram, whole in others:
        wanted = whole == longest > own * made.config.kvcache_balancing_threshold
        for depth in (whole, dram) if by_times else (whole,) * wanted:
            if depth > own:
                found.append(plan(own_dram, own, dram, depth))
    if not by_times:
        return min(found, key=sum)
    # A fetch is worth its seconds and what its copies cost others.
    share = EVICTION_COST_SHARE * (candidate.prefill.node_id in blocks.full)
    return min(found, key=lambda way: sum(way) + share * (compute[1] - way[1]))


@pytest.mark.parametrize("policy", ["adaptive", "kvcache_centric"])
def test_fetch_or_compute_is_what_trying_every_source_gives(seed: int, policy: str) -> None:
    rng, fetched = random.Random(seed), 0
    for _ in range(40):
        made = conductor(fleet(rng, 3), policy=policy, ssd_bytes_per_s=rng.choice((1e8, 2e9)))
        blocks = Blocks(rng)
        for _ in range(rng.randint(0, 12)):
            blocks.change(made, 0.0)
        chain = rng.choice(CHAINS)
        request = replace(
            prompt("r", prompt_tokens=len(chain) * BLOCK_TOKENS + 1), block_keys=chain
        )
        for candidate in made.explain(request, 0.0).candidates:
            transfer_s, prefill_s = best_start_s(
                made, blocks, chain, candidate, policy == "adaptive"
            )
            found_s = candidate.predicted.transfer_s + candidate.predicted.prefill_s
            assert found_s == pytest.approx(transfer_s + prefill_s, rel=1e-9)
            assert bool(candidate.predicted.eviction_cost_s) == (
                policy == "adaptive"
                and candidate.fetch_node is not None
                and candidate.prefill.node_id in blocks.full
            )
            fetched += candidate.fetch_node is not None
    assert fetched, "too dull to prove anything"


def test_the_best_pairs_are_explained_as_they_are_among_all_of_them(seed: int) -> None:
    rng = random.Random(seed)
    made = conductor(fleet(rng, 3), policy="adaptive")
    request = prompt("r", prompt_tokens=5 * BLOCK_TOKENS + 1)
    whole = made.explain(request, 0.0)
    few = made.explain(request, 0.0, count_max=4)
    assert whole.left_out == 0 and few.left_out == len(whole.candidates) - 4 > 0
    assert few.candidates == whole.candidates[:4]
    assert [c.verdict for c in few.candidates].count("chosen") == 1
