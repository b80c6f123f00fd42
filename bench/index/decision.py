"""How long one decision takes, from block keys to a booked route, in the real Conductor.

There are N prefill and N decode workers, one of each on every node. The first half of a trace is
cached around the fleet, request i on node i % N. Then the second half arrives, and the fleet
behaves as predicted. A prefill ends at its predicted time, its node announces the new blocks, the
answer is decoded at the predicted time between tokens, and every worker reports each second. Ends
and reports come in between, as in a frontend; only `on_request` is timed. The rate of requests
keeps the prefill workers busy for LOAD of the time, whatever N is.

The fleet's coefficients are of LLaMA3-70B on 8 x A800; they change routes, not costs.

NVIDIA Dynamo's SelectionService, if its Python is given, routes the same requests to as many
workers, and its rounds take turns with ours (dynamo_client.py).

Not here: the decision (conductor/), lookups (lookups.py).
"""

from __future__ import annotations

import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from bench.harness.processes import PeerProcess
from bench.index.indexes import block_key
from conductor import Conductor, ConductorConfig, Request, Route
from loadtest.harness.result import Cell
from loadtest.replay.trace import TRACE_BLOCK_TOKENS, TraceRow
from mooncake_store.records.events import BlockAdded, Event, NodeUp, WorkerReported, WorkerUp
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

LOAD = 0.5
REPORT_EVERY_S = 1.0  # and a tick
PREFILL = (0.02, 1.0e-4, 2.0e-9)  # s, s per token, s per pair of tokens
DECODE = (0.02, 1.0e-4, 2.0e-8)  # s, s per sequence, s per token of context
BLOCK_BYTES = TRACE_BLOCK_TOKENS * 327_680  # 320 KiB a token
TRANSFER_BYTES_PER_S = 20e9
TTFT_SLO_S = 300.0  # every prompt of the trace is admitted
TBT_SLO_S = 1.0
WARM_UP = 500  # decisions that are not counted
ROLES = ("prefill", "decode")


class DecisionTime(NamedTuple):
    """One decision, in microseconds."""

    wall_us: float
    cpu_us: float  # of this thread; excludes other work of a busy machine


@dataclass(slots=True)
class PredictedFleet:
    """Workers that behave exactly as predicted."""

    conductor: Conductor
    size: int
    due: list[tuple[float, int, str, Route, Request]] = field(default_factory=list)
    # worker -> request -> tokens
    prefilling: dict[str, dict[str, int]] = field(default_factory=dict)
    decoding: dict[str, dict[str, int]] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        events: list[Event] = []
        for n in range(self.size):
            node = NodeInfo(f"s{n}", "n1", f"host{n}", "", 1 << 40, "", b"", 0)
            events.append(NodeUp(node))
            events += [WorkerUp(_worker(f"{role[0]}{n}", role, f"s{n}")) for role in ROLES]
            self.prefilling[f"p{n}"], self.decoding[f"d{n}"] = {}, {}
        self.conductor.on_events(events, 0.0)

    def cache(self, rows: Sequence[TraceRow]) -> None:
        for number, row in enumerate(rows):
            node_id = f"s{number % self.size}"
            keys = map(block_key, row.hash_ids)
            self.conductor.on_events([BlockAdded(key, node_id) for key in keys], 0.0)

    def sent(self, route: Route, request: Request, now_s: float) -> None:
        new_tokens = request.prompt_tokens - route.cached_tokens
        self.prefilling[route.prefill.worker_id][request.request_id] = new_tokens
        said = route.predicted
        self._at(now_s + said.ttft_s - said.handover_s, "prefilled", route, request)

    def advance(self, now_s: float) -> None:
        """Process all ends until then, in order."""
        while self.due and self.due[0][0] <= now_s:
            at_s, _, kind, route, request = heapq.heappop(self.due)
            said, request_id = route.predicted, request.request_id
            if kind == "prefilled":
                del self.prefilling[route.prefill.worker_id][request_id]
                self.decoding[route.decode.worker_id][request_id] = request.prompt_tokens
                self.conductor.on_prefill_finished(
                    request_id, at_s, route.cached_tokens, said.prefill_s
                )
                new = request.block_keys[route.local_blocks :]
                node_id = route.prefill.node_id
                self.conductor.on_events([BlockAdded(key, node_id) for key in new], at_s)
                decode_s = said.handover_s + request.output_tokens_max * said.tbt_s
                self._at(at_s + decode_s, "finished", route, request)
            else:
                del self.decoding[route.decode.worker_id][request_id]
                self.conductor.on_finished(request_id, at_s)

    def report(self, now_s: float) -> None:
        reports = [
            WorkerReport(name, "w1", len(waiting), sum(waiting.values()), 0, 0, 0, 0.0, False)
            for name, waiting in self.prefilling.items()
        ]
        for name, batch in self.decoding.items():
            tokens = sum(batch.values())
            step_s = DECODE[0] + DECODE[1] * len(batch) + DECODE[2] * tokens
            pages = tokens // TRACE_BLOCK_TOKENS + len(batch)
            reports.append(WorkerReport(name, "w1", 0, 0, len(batch), pages, tokens, step_s, False))
        self.conductor.on_events([WorkerReported(report) for report in reports], now_s)

    def _at(self, at_s: float, kind: str, route: Route, request: Request) -> None:
        self._number += 1
        heapq.heappush(self.due, (at_s, self._number, kind, route, request))


def _worker(worker_id: str, role: str, node_id: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id,
        "w1",
        role,
        node_id,
        "print",
        "",
        "",
        TRACE_BLOCK_TOKENS,
        BLOCK_BYTES,
        context_tokens_max=200_000,
        pages_max=4_000,
        slots_max=256,
        prefill_coefficients=PREFILL,
        decode_coefficients=DECODE,
        transfer_bytes_per_s={},
        transfer_latency_s={},
    )


def gap_s(rows: Sequence[TraceRow], workers: int) -> float:
    """Seconds between requests that keep the prefill workers busy for LOAD of the time, if nothing
    of the prompts were cached."""
    base_s, token_s, pair_s = PREFILL
    each_s = (
        base_s + token_s * row.input_tokens + pair_s * row.input_tokens**2 / 2 for row in rows
    )
    return statistics.fmean(each_s) / (LOAD * workers)


def fleet_of(policy: str, workers: int) -> PredictedFleet:
    config = ConductorConfig(
        policy=policy,
        ttft_slo_s=TTFT_SLO_S,
        tbt_slo_s=TBT_SLO_S,
        transfer_bytes_per_s=TRANSFER_BYTES_PER_S,
    )
    return PredictedFleet(Conductor(config), workers)


def decided_us(
    fleet: PredictedFleet, rows: Iterable[TraceRow], every_s: float
) -> list[DecisionTime]:
    """Each decision, in order; RuntimeError when a request is rejected."""
    times: list[DecisionTime] = []
    clock, cpu_clock, next_report_s = time.perf_counter_ns, time.thread_time_ns, 0.0
    for number, row in enumerate(rows):
        now_s = number * every_s
        fleet.advance(now_s)
        if now_s >= next_report_s:
            fleet.report(now_s)
            fleet.conductor.on_tick(now_s)
            next_report_s = now_s + REPORT_EVERY_S
        blocks = row.hash_ids[: row.input_tokens // TRACE_BLOCK_TOKENS]
        keys = [block_key(block) for block in blocks]
        request = Request(f"r{number}", row.input_tokens, keys, row.output_tokens)
        cpu_began, began = cpu_clock(), clock()
        decision = fleet.conductor.on_request(request, now_s)
        ended, cpu_ended = clock(), cpu_clock()
        times.append(DecisionTime((ended - began) / 1e3, (cpu_ended - cpu_began) / 1e3))
        if not isinstance(decision, Route):
            raise RuntimeError(f"request {number}: {decision.kind}: {decision.reason}")
        fleet.sent(decision, request, now_s)
    return times


class OurDecisions:
    """Rounds of one policy, each with a fleet of its own."""

    def __init__(
        self, rows: Sequence[TraceRow], workers: int, policy: str, decisions_max: int
    ) -> None:
        self.policy, self._workers, self._rows = policy, workers, rows
        self._timed_max, self._every_s = decisions_max, gap_s(rows, workers)
        self._rounds: list[list[DecisionTime]] = []

    def round(self) -> None:
        half = len(self._rows) // 2
        fleet = fleet_of(self.policy, self._workers)
        fleet.cache(self._rows[:half])
        arriving = islice(self._rows, half, half + WARM_UP + self._timed_max)
        self._rounds.append(decided_us(fleet, arriving, self._every_s)[WARM_UP:])

    def row(self) -> dict[str, Cell]:
        wall = [sorted(took.wall_us for took in one) for one in self._rounds]
        cpu = [sorted(took.cpu_us for took in one) for one in self._rounds]
        p50, p99 = _median_at(wall, 50), _median_at(wall, 99)
        return {
            "what": "decision",
            "policy": self.policy,
            "workers": self._workers,
            "decisions": len(self._rounds[0]),
            "p50_us": round(p50, 1),
            "p99_us": round(p99, 1),
            "p99_over_p50": round(p99 / p50, 2),
            "cpu_p50_us": round(_median_at(cpu, 50), 1),
            "cpu_p99_us": round(_median_at(cpu, 99), 1),
        }


class DynamoSelections:
    """NVIDIA Dynamo's SelectionService in a process of the Python with its wheel, until the stack
    ends. It gets the same requests, and its logging of selections is off."""

    def __init__(
        self, stack: ExitStack, python: Path, rows: Sequence[TraceRow], decisions_max: int
    ) -> None:
        """RuntimeError, with its last output, when it does not run."""
        blocks = [row.hash_ids[: row.input_tokens // TRACE_BLOCK_TOKENS] for row in rows]
        began = len(rows) // 2 + WARM_UP
        load = {"before": blocks[:began], "timed": blocks[began : began + decisions_max]}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        (folder / "load.json").write_text(json.dumps(load))
        self._process = PeerProcess(
            stack,
            python,
            Path(__file__).with_name("dynamo_client.py"),
            "select",
            str(folder / "load.json"),
            variables={"DYN_LOG": "error", "DYN_ROUTER_USE_KV_EVENTS": "false"},
        )
        self._version, self._timed = self._process.answer()["version"], len(load["timed"])
        self._rounds: dict[int, list[dict[str, float]]] = {}

    def round(self, workers: int) -> None:
        self._rounds.setdefault(workers, []).append(self._process.ask(str(workers)))

    def row(self, workers: int) -> dict[str, Cell]:
        p50, p99 = (
            statistics.median(one[name] for one in self._rounds[workers])
            for name in ("p50_us", "p99_us")
        )
        return {
            "what": "decision",
            "policy": f"Dynamo {self._version}, select_and_reserve",
            "workers": workers,
            "decisions": self._timed,
            "p50_us": round(p50, 1),
            "p99_us": round(p99, 1),
            "p99_over_p50": round(p99 / p50, 2),
        }


def _median_at(rounds: Sequence[Sequence[float]], percent: int) -> float:
    return statistics.median(ordered[len(ordered) * percent // 100] for ordered in rounds)
