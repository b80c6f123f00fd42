"""A toy fleet around a real Conductor, to see what its policies do to a whole workload.

Prefill workers compute one prompt at a time, least key first; decode workers take one step at a
time with all they have; both take the seconds that their estimates say, give or take `noise`. Each
prefill worker has its own node with an LRU cache. No pages, no failures, no congestion.

    python -m tests.conductor.toy_fleet TRACE --rate 3 --requests 6000 --admission reserved

prints one line of results. The figures in conductor/README.md come from it. The simulator in
loadtest/ is the real thing, with the real directory and batching.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conductor import Conductor, ConductorConfig, Reject, Request, Route
from conductor.estimates import DecodeEstimate, PrefillEstimate
from loadtest.trace import TRACE_BLOCK_TOKENS, TraceRow, read_trace
from mooncake_store.events import BlockAdded, BlockRemoved, Event, NodeUp, WorkerReported, WorkerUp
from tests.conductor.fleet import node, report, worker

# Roughly LLaMA3-70B on 8xA800, as PAPER figures imply: 8k tokens in 0.9 s, 320 KB of KV a token.
PREFILL = PrefillEstimate(0.05, 1.0e-4, 1.2e-9)
DECODE = DecodeEstimate(0.03, 0.003, 1.6e-7)
TOKEN_BYTES = 327_680
LINK_BYTES_PER_S = 25e9
STEPS_AT_ONCE = 8  # decode steps that are simulated as one


@dataclass
class Job:
    request: Request
    route: Route
    arrived_s: float
    tokens_left: int
    context_tokens: int
    steps_s: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    ttfts_s: list[float] = field(default_factory=list)
    tbts_s: list[float] = field(default_factory=list)  # mean of a request's longest 10 %
    errors: list[float] = field(default_factory=list)  # |actual - predicted| / actual TTFT
    rejected: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def within(self, tbt_s: float) -> int:
        """Answers whose time between tokens kept the limit; admission checked their TTFT."""
        return sum(found <= tbt_s for found in self.tbts_s)

    def summary(self, tbt_slo_s: float) -> str:
        answered = max(1, len(self.ttfts_s))
        return (
            f"answered={len(self.ttfts_s)} within_tbt={self.within(1.1 * tbt_slo_s)} "
            f"rejected={self.rejected} ttft_mean={sum(self.ttfts_s) / answered:.2f}s "
            f"tbt_median={sorted(self.tbts_s)[len(self.tbts_s) // 2]:.3f}s "
            f"hit={self.cached_tokens / max(1, self.prompt_tokens):.3f} "
            f"ttft_error={sum(self.errors) / answered:.3f}"
        )


class ToyFleet:
    """Virtual time, a heap of things to do, and the conductor under test."""

    def __init__(self, config: ConductorConfig, prefills: int, decodes: int,
                 cache_blocks: int = 6_000, noise: float = 0.1, seed: int = 0) -> None:  # fmt: skip
        self.conductor = Conductor(replace(config, queue_preempts=False))
        self.outcome = Outcome()
        self.rng, self.noise, self.cache_blocks = random.Random(seed), noise, cache_blocks
        self.now_s, self.alive = 0.0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.caches: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(prefills)]
        self.queues: list[deque[Job]] = [deque() for _ in range(prefills)]
        self.computing: list[tuple[float, float, int] | None] = [None] * prefills
        self.waiting: list[deque[Job]] = [deque() for _ in range(decodes)]
        self.batches: list[list[Job]] = [[] for _ in range(decodes)]
        nodes = [f"s{n}" for n in range(prefills + decodes)]
        events: list[Event] = [NodeUp(node(node_id)) for node_id in nodes]
        for role, count, first in (("prefill", prefills, 0), ("decode", decodes, prefills)):
            events += [
                WorkerUp(worker(
                    f"{role[0]}{n}", role, f"s{first + n}", block_tokens=TRACE_BLOCK_TOKENS,
                    block_bytes=TRACE_BLOCK_TOKENS * TOKEN_BYTES, context_tokens_max=1_000_000,
                    pages_max=10_000, slots_max=64 if role == "decode" else 10_000,
                    prefill_coefficients=PREFILL.coefficients,
                    decode_coefficients=DECODE.coefficients, transfer_latency_s=0.002,
                    transfer_bytes_per_s=dict.fromkeys(nodes, LINK_BYTES_PER_S),
                ))
                for n in range(count)
            ]  # fmt: skip
        self.conductor.on_events(events, 0.0)

    def run(self, rows: Sequence[TraceRow], rate: float) -> Outcome:
        """Replay the rows, `rate` times as fast as recorded, and drain."""
        self.alive = len(rows)
        for row in rows:
            self.at(row.timestamp_ms / 1e3 / rate, lambda row=row: self.arrive(row))
        self.at(0.5, self.report)
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.conductor.check()
        return self.outcome

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (due_s, next(self._order), action))

    def taking(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - self.noise, 1 + self.noise)

    def arrive(self, row: TraceRow) -> None:
        full = row.hash_ids[: row.input_tokens // TRACE_BLOCK_TOKENS]
        keys = [number.to_bytes(16, "big") for number in full]
        request = Request(f"r{row.line}", row.input_tokens, keys, max(1, row.output_tokens))
        decision = self.conductor.on_request(request, self.now_s)
        if isinstance(decision, Reject):
            kind, counts = decision.kind, self.outcome.rejected
            counts[kind] = counts.get(kind, 0) + 1
            self.alive -= 1
            return
        job = Job(request, decision, self.now_s, request.output_tokens_max, request.prompt_tokens)
        number = int(decision.prefill.worker_id[1:])
        self.queues[number].append(job)
        self.prefill(number)

    def prefill(self, number: int) -> None:
        if self.computing[number] is not None or not self.queues[number]:
            return
        job = min(self.queues[number], key=lambda job: job.route.order_key_s)
        self.queues[number].remove(job)
        keys, route, cache = job.request.block_keys, job.route, self.caches[number]
        blocks = local = sum(1 for _ in itertools.takewhile(cache.__contains__, keys))
        if route.fetch_node is not None:
            source = self.caches[int(route.fetch_node[1:])]
            both = itertools.takewhile(lambda key: key in cache or key in source, keys)
            blocks = max(local, min(sum(1 for _ in both), route.local_blocks + route.fetch_blocks))
        move_s = (blocks - local) * TRACE_BLOCK_TOKENS * TOKEN_BYTES / LINK_BYTES_PER_S
        cached = min(blocks * TRACE_BLOCK_TOKENS, job.request.prompt_tokens - 1)
        new_tokens = job.request.prompt_tokens - cached
        seconds = self.taking(PREFILL.seconds(new_tokens, cached))
        self.outcome.prompt_tokens += job.request.prompt_tokens
        self.outcome.cached_tokens += cached
        start_s = self.now_s + move_s
        self.computing[number] = (start_s, seconds, new_tokens)
        name = job.request.request_id
        self.at(start_s, lambda: self.conductor.on_prefill_started(name, self.now_s, cached))
        self.at(start_s + seconds, lambda: self.prefilled(number, job, cached, seconds))

    def prefilled(self, number: int, job: Job, cached: int, seconds: float) -> None:
        cache, events = self.caches[number], list[Event]()
        for key in job.request.block_keys:
            if key not in cache:
                events.append(BlockAdded(key, f"s{number}"))
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > self.cache_blocks:
            events.append(BlockRemoved(cache.popitem(last=False)[0], f"s{number}"))
        self.conductor.on_events(events, self.now_s)
        self.conductor.on_prefill_finished(job.request.request_id, self.now_s, cached, seconds)
        actual_s, predicted = self.now_s - job.arrived_s, job.route.predicted
        self.outcome.ttfts_s.append(actual_s)
        self.outcome.errors.append(
            abs(actual_s - predicted.ttft_s + predicted.handover_s) / actual_s
        )
        self.computing[number] = None
        self.prefill(number)
        decode = int(job.route.decode.worker_id[1:])
        self.waiting[decode].append(job)
        if not self.batches[decode]:
            self.step(decode)

    def step(self, number: int) -> None:
        batch, waiting = self.batches[number], self.waiting[number]
        while waiting and len(batch) < 64:
            batch.append(waiting.popleft())
        if batch:
            step_s = self.taking(DECODE.step_s(len(batch), sum(j.context_tokens for j in batch)))
            steps = min(STEPS_AT_ONCE, min(job.tokens_left for job in batch))
            self.at(self.now_s + steps * step_s, lambda: self.stepped(number, step_s, steps))

    def stepped(self, number: int, step_s: float, steps: int) -> None:
        for job in list(self.batches[number]):
            job.context_tokens += steps
            job.tokens_left -= steps
            job.steps_s += [step_s] * steps
            if job.tokens_left <= 0:
                self.batches[number].remove(job)
                longest = sorted(job.steps_s)[-max(1, len(job.steps_s) // 10) :]
                self.outcome.tbts_s.append(sum(longest) / len(longest))
                tokens = job.request.output_tokens_max
                self.conductor.on_finished(job.request.request_id, self.now_s, tokens)
                self.alive -= 1
        self.step(number)

    def report(self) -> None:
        said = []
        for number, queue in enumerate(self.queues):
            # As the real worker does: what it has not looked up yet counts as uncached.
            tokens = sum(job.request.prompt_tokens for job in queue)
            computing = self.computing[number]
            if computing is not None:
                start_s, seconds, new_tokens = computing
                done = min(1.0, max(0.0, (self.now_s - start_s) / seconds))
                tokens += int(new_tokens * (1 - done))
            running = int(computing is not None)
            said.append(
                report(
                    f"p{number}",
                    queue_requests=len(queue) + running,
                    queue_tokens=tokens,
                    running=running,
                )
            )
        for number, batch in enumerate(self.batches):
            context = sum(job.context_tokens for job in batch)
            pages = sum((j.context_tokens + j.tokens_left) // TRACE_BLOCK_TOKENS + 1 for j in batch)
            said.append(report(
                f"d{number}", queue_requests=len(self.waiting[number]), running=len(batch),
                pages_used=pages, context_tokens=context, step_s=DECODE.step_s(len(batch), context),
            ))  # fmt: skip
        self.conductor.on_events([WorkerReported(report) for report in said], self.now_s)
        self.conductor.on_tick(self.now_s)
        if self.alive:
            self.at(self.now_s + 1.0, self.report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--prefills", type=int, default=8)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--routing", default="kvcache_centric")
    parser.add_argument("--admission", default="reserved")
    parser.add_argument("--shedding", default="limit")
    parser.add_argument("--threshold", type=float, default=1.5)
    parser.add_argument("--ttft-slo", type=float, default=30.0)
    parser.add_argument("--tbt-slo", type=float, default=0.15)
    a = parser.parse_args()
    config = ConductorConfig(
        ttft_slo_s=a.ttft_slo, tbt_slo_s=a.tbt_slo, policy=a.routing, queue_order="fifo",
        admission=a.admission, shedding=a.shedding, kvcache_balancing_threshold=a.threshold,
        decode_s_expected=30.0,
    )  # fmt: skip
    fleet = ToyFleet(config, a.prefills, a.decodes)
    print(fleet.run(read_trace(a.trace, a.requests), a.rate).summary(a.tbt_slo))


if __name__ == "__main__":
    main()
