"""An overload that is short of decoding, on cores that prefill and decode share: what predicting
saves. The same on a real server is `python -m bench.overload --decode-bound`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from conductor import ConductorConfig
from loadtest.profile.profile import Sharing
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import MeasuredWorker
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.site import ClusterSettings

PREFILL, DECODE = (0.004, 8e-5, 7e-8), (0.003, 2.5e-4, 4e-7)  # about the demo checkpoint
BLOCK_TOKENS, PROMPT_TOKENS, TOKEN_BYTES = 64, 512, 2_048
TBT_SLO_S, TTFT_SLO_S = 0.008, 5.0
SECONDS = 15.0
SEEDS = range(2)


@dataclass(frozen=True)
class Machine:
    per_s: float  # offered
    shared: float  # a step takes so many times as long while the other role computes
    jitter: float


SMALL = Machine(per_s=8.0, shared=1.45, jitter=0.3)  # about two vCPUs
LARGE = Machine(per_s=16.0, shared=1.0, jitter=0.05)  # cores of its own for each worker


def offered(seed: int, per_s: float) -> list[Offered]:
    chance = np.random.default_rng(seed)
    count = int(per_s * SECONDS)
    at_s = np.cumsum(chance.exponential(1 / per_s, count)).tolist()
    tokens = chance.integers(128, 512, count, endpoint=True).tolist()
    keys = [
        [f"{number}-{block}".encode().ljust(16) for block in range(PROMPT_TOKENS // BLOCK_TOKENS)]
        for number in range(count)
    ]
    return [Offered(n, at_s[n], PROMPT_TOKENS, tokens[n], keys[n]) for n in range(count)]


def is_within(job: SimulatedJob) -> bool:
    if job.finished_s is None or job.prefilled_s is None:
        return False
    step_s = (job.finished_s - job.prefilled_s) / (job.output_tokens - 1)
    return job.prefilled_s - job.arrived_s <= TTFT_SLO_S and step_s <= TBT_SLO_S


def runs(admission: str, machine: Machine) -> tuple[int, int]:
    """(answered within the limits, refused after their prefill) over all seeds."""
    jobs: list[SimulatedJob] = []
    for seed in SEEDS:
        config = ConductorConfig(
            admission=admission,
            shedding="limit",
            policy="adaptive",
            ttft_slo_s=TTFT_SLO_S,
            tbt_slo_s=TBT_SLO_S,
            decode_s_expected=3.0,
        )
        settings = ClusterSettings(
            prefills=1,
            decodes=2,
            block_tokens=BLOCK_TOKENS,
            node_blocks=4_096,
            chunk_tokens=512,
            decode_slots=32,
            max_tokens=1,
            nic_bytes_per_s=2e9,
            host_to_gpu_bytes_per_s=5e9,
            sharing=Sharing(machine.shared, machine.shared),
            jitter=machine.jitter,
            seed=seed,
            report_s=0.5,
        )
        pages_bytes = 512 * BLOCK_TOKENS * TOKEN_BYTES
        gpu = MeasuredWorker(PREFILL, DECODE, TOKEN_BYTES, pages_bytes)
        jobs += SimulatedFleet(config, settings, gpu).run(offered(seed, machine.per_s))
    return sum(map(is_within, jobs)), refused(jobs)


def refused(jobs: Sequence[SimulatedJob]) -> int:
    return sum(bool(job.refused) for job in jobs)


ADMISSIONS = ("reserved", "predictive", "predictive_lengths")


@pytest.fixture(scope="module")
def baselines() -> dict[Machine, tuple[int, int]]:
    found = {machine: runs("baseline", machine) for machine in (SMALL, LARGE)}
    for machine, (_, wasted) in found.items():
        assert wasted > 0.1 * len(SEEDS) * machine.per_s * SECONDS, "an overload to judge by"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_predicting_wastes_less_and_serves_more(
    admission: str, baselines: dict[Machine, tuple[int, int]]
) -> None:
    (within, wasted), baseline = runs(admission, SMALL), baselines[SMALL]
    print(f"{admission}: {within} within, {wasted} wasted; baseline {baseline}")
    assert wasted <= 0.45 * baseline[1], "about 0.5 when workers refused for their last five steps"
    assert within > baseline[0], "what prefill does not take is left to decoding"


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_where_prefill_takes_nothing_from_decoding_few_answers_are_lost(
    admission: str, baselines: dict[Machine, tuple[int, int]]
) -> None:
    (within, wasted), baseline = runs(admission, LARGE), baselines[LARGE]
    print(f"{admission}: {within} within, {wasted} wasted; baseline {baseline}")
    assert wasted <= 0.25 * baseline[1] and within >= 0.9 * baseline[0]
