"""Small simulated clusters for tests, and the start of a published trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from conductor import ConductorConfig
from loadtest.replay.trace import TRACE_BLOCK_TOKENS, read_trace
from loadtest.simulator.block_cache import key_of
from loadtest.simulator.cluster.fleet import Fault, SimulatedFleet
from loadtest.simulator.cluster.gpu import GpuModel, Roofline
from loadtest.simulator.cluster.job import Offered, SimulatedJob, offered_of
from loadtest.simulator.cluster.site import ClusterSettings

START = Path(__file__).parents[2] / "data" / "conversation_start.jsonl"
ONE_AND_ONE = ClusterSettings(prefills=1, decodes=1, jitter=0.0)
OPEN = ConductorConfig(admission="none", advisory=True, queue_order="fifo")


@lru_cache
def start_of_trace() -> list[Offered]:
    return offered_of(read_trace(START), TRACE_BLOCK_TOKENS)


def prompt(
    number: int, at_s: float, blocks: Sequence[int], output_tokens: int = 2, tail_tokens: int = 0
) -> Offered:
    """A prompt of these blocks of 512 tokens, and some tokens that fill none."""
    tokens = len(blocks) * TRACE_BLOCK_TOKENS + tail_tokens
    return Offered(number, at_s, tokens, output_tokens, [key_of(block) for block in blocks])


def fleet(
    settings: ClusterSettings = ONE_AND_ONE,
    config: ConductorConfig = OPEN,
    gpu: GpuModel | None = None,
    faults: Sequence[Fault] = (),
    **changes: object,
) -> SimulatedFleet:
    changed = replace(config, **changes)  # type: ignore[arg-type]
    return SimulatedFleet(changed, settings, gpu or Roofline(), faults)


def everything(jobs: Sequence[SimulatedJob]) -> list[tuple[object, ...]]:
    """Everything that came of each request, to compare runs to the last bit."""
    return [
        (
            job.number,
            job.request_id,
            job.route,
            job.reject,
            job.refused,
            job.started_s,
            job.cached_tokens,
            job.fetched_blocks,
            job.compute_s,
            job.prefilled_s,
            job.first_token_s,
            job.joined_s,
            job.finished_s,
            job.tbt_s,
            job.tbt_decode_s,
        )
        for job in jobs
    ]
