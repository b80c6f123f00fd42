"""The commands that a scenario is written in, each one call of a real Conductor.

A command is `verb words name=value ...`; prompts are runs of blocks as in fleet.py; times are
seconds. The conductor proves its invariants after every command.

Not here: reading scenarios and comparing (test_scenarios.py).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import fields

from backends.config_pbtxt import convert
from conductor import Conductor, ConductorConfig, Prediction, Reject, Request, Route
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    NodeDown,
    NodeUp,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from tests.conductor.fleet import BLOCK_TOKENS, keys, node, report, worker

KINDS = {field.name: str(field.type) for field in fields(ConductorConfig)}


class Play:
    """One conductor and the commands of a scenario: `verb words name=value ...`."""

    def __init__(self) -> None:
        self.config: dict[str, object] = {"ttft_slo_s": 30.0, "tbt_slo_s": 1.0}
        self.now_s = 0.0
        self.made: Conductor | None = None

    @property
    def conductor(self) -> Conductor:
        if self.made is None:
            self.made = Conductor(ConductorConfig(**self.config))
        return self.made

    def run(self, line: str) -> list[str]:
        verb, *words = line.split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        lines = getattr(self, verb)(*plain, **values)
        if self.made is not None:
            self.made.check()
        return lines or []

    def set(self, **values: str) -> None:
        for name, text in values.items():
            self.config[name] = convert(KINDS[name], text)

    def at(self, seconds: str) -> None:
        self.now_s = float(seconds)

    def node(self, node_id: str, incarnation: str = "n1", bytes: str = "1000000000000") -> None:
        self.conductor.on_events([NodeUp(node(node_id, incarnation, int(bytes)))], self.now_s)

    def node_down(self, node_id: str, incarnation: str = "n1") -> None:
        self.conductor.on_events([NodeDown(node_id, incarnation)], self.now_s)

    def worker(
        self,
        worker_id: str,
        role: str,
        node_id: str,
        incarnation: str = "w1",
        rate: str = "",
        **values: str,
    ) -> None:
        changes: dict[str, object] = {"incarnation": incarnation}
        for name, text in values.items():
            if name in ("prefill", "decode"):
                changes[f"{name}_coefficients"] = tuple(map(float, text.split(",")))
            else:
                changes[name] = int(text)
        if rate:
            changes["transfer_bytes_per_s"] = dict.fromkeys(("s0", "s1", "s2"), float(rate))
        self.conductor.on_events(
            [WorkerUp(worker(worker_id, role, node_id, **changes))], self.now_s
        )

    def worker_down(self, worker_id: str, incarnation: str = "w1") -> None:
        self.conductor.on_events([WorkerDown(worker_id, incarnation)], self.now_s)

    def report(
        self,
        *worker_ids: str,
        incarnation: str = "w1",
        step: str = "0",
        draining: str = "",
        **values: str,
    ) -> None:
        changes: dict[str, object] = {name: int(text) for name, text in values.items()}
        for worker_id in worker_ids:
            said = report(
                worker_id, incarnation, step_s=float(step), is_draining=bool(draining), **changes
            )
            self.conductor.on_events([WorkerReported(said)], self.now_s)

    def cached(self, node_id: str, blocks: str) -> None:
        self.conductor.on_events([BlockAdded(k, node_id) for k in keys(blocks)], self.now_s)

    def evicted(self, node_id: str, blocks: str) -> None:
        self.conductor.on_events([BlockRemoved(k, node_id) for k in keys(blocks)], self.now_s)

    def asked(
        self,
        request_id: str,
        blocks: str = "",
        prompt: str = "",
        output: str = "10",
        priority: str = "0",
        avoid: str = "",
        tenant: str = "",
        resumed: str = "",
    ) -> Request:
        block_keys = keys(blocks)
        avoided = frozenset((name, "w1") for name in avoid.split(",") if name)
        tokens = int(prompt) if prompt else len(block_keys) * BLOCK_TOKENS + 1
        return Request(
            request_id,
            tokens,
            block_keys,
            int(output),
            int(priority),
            avoided,
            tenant,
            is_resumed=bool(resumed),
        )

    def request(self, *words: str, **values: str) -> list[str]:
        return [as_line(self.conductor.on_request(self.asked(*words, **values), self.now_s))]

    def flood(self, name: str, seconds: str, **values: str) -> list[str]:
        """Requests at a steady pace, `every` so many seconds, on workers that do them in turn and
        take the time that was predicted. Lists with | in them are gone through in turn."""
        every_s, until_s = float(values.pop("every")), self.now_s + float(seconds)
        kinds = {key: text.split("|") for key, text in values.items()}
        turns = math.lcm(*(len(texts) for texts in kinds.values()))
        free_s: dict[str, float] = {}
        running: list[tuple[float, str]] = []
        came, went_in = Counter[str](), Counter[str]()
        last, number = "", 0
        while self.now_s < until_s:
            while running and running[0][0] <= self.now_s:
                end_s, request_id = heapq.heappop(running)
                self.conductor.on_prefill_finished(request_id, end_s, 0)
                self.conductor.on_finished(request_id, end_s)
            turn = number % turns
            kind = {key: texts[turn % len(texts)] for key, texts in kinds.items()}
            label = " ".join(f"{key}={kind[key]}" for key in kinds if len(kinds[key]) > 1) or "all"
            request = self.asked(f"{name}{number}", **kind)
            answer = self.conductor.on_request(request, self.now_s)
            came[label] += 1
            if isinstance(answer, Route):
                went_in[label] += 1
                worker_id = answer.prefill.worker_id
                begin_s = max(self.now_s, free_s.get(worker_id, 0.0))
                free_s[worker_id] = begin_s + answer.predicted.prefill_s
                heapq.heappush(running, (free_s[worker_id], request.request_id))
            else:
                last = as_line(answer)
            number, self.now_s = number + 1, self.now_s + every_s
        for end_s, request_id in sorted(running):
            self.conductor.on_finished(request_id, max(end_s, self.now_s))
        rows = [f"{label}: {went_in[label]} of {came[label]} admitted" for label in came]
        return [*rows, *([last] if last else [])]

    def answers(self, name: str, count: str, tokens: str, **values: str) -> None:
        """So many requests one after the other, each answered with so many tokens."""
        for number in range(int(count)):
            request = self.asked(f"{name}{number}", output="50000", **values)
            assert isinstance(self.conductor.on_request(request, self.now_s), Route)
            self.conductor.on_prefill_finished(request.request_id, self.now_s, 0)
            self.conductor.on_finished(request.request_id, self.now_s, int(tokens))

    def explain(self, *words: str, **values: str) -> list[str]:
        return [
            f"{c.prefill.worker_id}+{c.decode.worker_id} {terms(c.predicted)} {c.verdict}"
            for c in self.conductor.explain(self.asked(*words, **values), self.now_s).candidates
        ]

    def prefilled(self, *request_ids: str, cached: str = "0", seconds: str = "") -> None:
        took_s = float(seconds) if seconds else None
        for request_id in request_ids:
            self.conductor.on_prefill_finished(request_id, self.now_s, int(cached), took_s)

    def finished(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.conductor.on_finished(request_id, self.now_s)

    def failed(self, worker_id: str, incarnation: str = "w1") -> None:
        self.conductor.on_worker_failed(worker_id, incarnation, self.now_s)

    def unreached(self, worker_id: str, incarnation: str = "w1") -> None:
        self.conductor.on_worker_reached(worker_id, incarnation, False, self.now_s)

    def reached(self, worker_id: str, incarnation: str = "w1") -> None:
        self.conductor.on_worker_reached(worker_id, incarnation, True, self.now_s)

    def refused(self, worker_id: str, incarnation: str = "w1") -> None:
        self.conductor.on_worker_refused(worker_id, incarnation, self.now_s)

    def tick(self) -> list[str]:
        return [
            f"replicate {len(s.block_keys)} blocks {s.block_keys[0].decode().rstrip('.')}.. "
            f"{s.source_node} -> {s.target_node}: {s.reason}"
            for s in self.conductor.on_tick(self.now_s)
        ] or ["nothing to replicate"]

    def status(self) -> list[str]:
        return [
            f"{s.worker.worker_id} {s.why_not or 'takes requests'}: queue={s.queue_s:.3f} "
            f"requests={s.requests:g} speed={s.speed_ratio:.2f}"
            for s in self.conductor.status(self.now_s)
        ]


def terms(p: Prediction) -> str:
    parts = [
        f"{name}={getattr(p, name + '_s'):.3f}"
        for name in ("ttft", "queue", "transfer", "prefill", "handover", "tbt")
    ]
    parts += [f"delay={p.delay_s:.3f}"] if p.delay_s else []
    return " ".join(parts)


def as_line(decision: Route | Reject) -> str:
    if isinstance(decision, Reject):
        again = f"retry_after={decision.retry_after_s:.2f}"
        return f"reject {decision.request_id} {decision.kind} {again}: {decision.reason}"
    fetch = f" fetch={decision.fetch_blocks} from {decision.fetch_node}" * bool(decision.fetch_node)
    advice = f" advice={decision.advice.kind}" if decision.advice else ""
    return (
        f"route {decision.request_id} {decision.prefill.worker_id}+{decision.decode.worker_id} "
        f"cached={decision.cached_tokens}{fetch} {terms(decision.predicted)}{advice}"
    )
