"""A small fleet for tests: nodes, workers, reports and prompts with readable names.

A prompt is written as runs of blocks, `a*3+b*2`: block names a0 a1 a2 b0 b1, one key each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from conductor import Conductor, ConductorConfig, Request
from mooncake_store.records.events import (
    BlockAdded,
    Event,
    NodeDown,
    NodeUp,
    Snapshot,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

BLOCK_TOKENS = 64
PREFILL = (0.01, 0.001, 0.0)  # 10 ms + 1 ms a token
DECODE = (0.02, 0.005, 0.0)  # 20 ms + 5 ms a sequence


def keys(text: str) -> list[bytes]:
    """`a*2+b*1` -> the keys of a0 a1 b0."""
    found = []
    for run in filter(None, text.split("+")):
        name, _, count = run.partition("*")
        found += [f"{name}{number}".encode().ljust(16, b".") for number in range(int(count or 1))]
    return found


def node(node_id: str, incarnation: str = "n1", segment_bytes: int = 1 << 40) -> NodeInfo:
    return NodeInfo(node_id, incarnation, "host", f"/dev/shm/{node_id}", segment_bytes, "", b"", 0)


def worker(worker_id: str, role: str, node_id: str, **changes: object) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=worker_id,
        incarnation="w1",
        role=role,
        node_id=node_id,
        fingerprint="f",
        description="",
        inbox=f"inproc://{worker_id}",
        block_tokens=BLOCK_TOKENS,
        block_bytes=1_000_000,
        context_tokens_max=100_000,
        pages_max=2_000,
        slots_max=8,
        prefill_coefficients=PREFILL,
        decode_coefficients=DECODE,
        transfer_bytes_per_s={},
        transfer_latency_s={},
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def report(worker_id: str, incarnation: str = "w1", **changes: object) -> WorkerReport:
    idle = WorkerReport(worker_id, incarnation, 0, 0, 0, 0, 0, 0.0, False)
    return replace(idle, **changes)  # type: ignore[arg-type]


def prompt(
    request_id: str,
    blocks: str = "",
    prompt_tokens: int | None = None,
    output: int = 10,
    **changes: object,
) -> Request:
    """A request whose prompt is these blocks and one token more, unless said otherwise."""
    block_keys = keys(blocks)
    tokens = len(block_keys) * BLOCK_TOKENS + 1 if prompt_tokens is None else prompt_tokens
    return Request(request_id, tokens, block_keys, output, **changes)  # type: ignore[arg-type]


def added(node_id: str, blocks: str) -> list[Event]:
    return [BlockAdded(key, node_id) for key in keys(blocks)]


def fleet(prefills: int = 2, decodes: int = 2, nodes: int = 2, **changes: object) -> list[Event]:
    """Workers p0 p1 .. and d0 d1 .. spread over nodes s0 s1 .."""
    found: list[Event] = [NodeUp(node(f"s{n}")) for n in range(nodes)]
    for role, count in (("prefill", prefills), ("decode", decodes)):
        found += [
            WorkerUp(worker(f"{role[0]}{n}", role, f"s{n % nodes}", **changes))
            for n in range(count)
        ]
    return found


def conductor(events: Iterable[Event] | None = None, **config: object) -> Conductor:
    """A conductor that knows the fleet since 0.0 s."""
    made = Conductor(ConductorConfig(**config))  # type: ignore[arg-type]
    made.on_events(fleet() if events is None else events, 0.0)
    return made


__all__ = [
    "BLOCK_TOKENS",
    "DECODE",
    "PREFILL",
    "NodeDown",
    "Snapshot",
    "WorkerDown",
    "WorkerReported",
    "added",
    "conductor",
    "fleet",
    "keys",
    "node",
    "prompt",
    "report",
    "worker",
]
