"""Clusters of workers like the one that `mooncake profile` measured.

The profile gives the time of steps instead of a GPU's roofline, and their slowdown on shared cores.
It also has the rates of a cached prefix, and the time through the frontend and of the hand-over.
Values that it lacks are those of any cluster (site.py).

Not here: measuring, and the file's format (loadtest/profile).
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path

from conductor import ConductorConfig
from loadtest.profile.profile import BurstMeans, Profile
from loadtest.simulator.block_cache import key_of
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import MeasuredWorker
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.site import ClusterSettings

FIT_ROUNDS, BURST_BLOCKS = 12, 4_096
NO_TIME_BYTES_PER_S = 1e12  # used where loading was too quick to be measured


def read_profile(path: Path) -> Profile:
    """ValueError or OSError, with the reason, when the file cannot be read."""
    return Profile.from_json(path.read_text(encoding="utf-8"))


def token_bytes(profile: Profile) -> int:
    return int(profile.settings["token_bytes"])


def settings_of(profile: Profile, settings: ClusterSettings) -> ClusterSettings:
    """`settings` with every value of the profile instead."""
    serving, sources, found = profile.serving, profile.sources, profile.settings
    load_s, load_bytes = serving.per_cached_token_s, token_bytes(profile)
    block_tokens = int(found["block_tokens"])
    chunk_tokens = int(found.get("chunk_tokens", settings.chunk_tokens))
    made = replace(
        settings,
        block_tokens=block_tokens,
        chunk_tokens=max(block_tokens, chunk_tokens // block_tokens * block_tokens),
        decode_slots=int(found.get("slots", settings.decode_slots)),
        host_to_gpu_bytes_per_s=load_bytes / load_s if load_s else NO_TIME_BYTES_PER_S,
        nic_bytes_per_s=sources.node_bytes_per_s or settings.nic_bytes_per_s,
        nic_latency_s=0.0,  # the profile's gaps and rates include it
        ssd_read_bytes_per_s=sources.ssd_bytes_per_s or settings.ssd_read_bytes_per_s,
        ssd_write_bytes_per_s=sources.ssd_bytes_per_s or settings.ssd_write_bytes_per_s,
        serving_s=serving.base_s,
        handover_s=serving.handover_s,
        handover_beside_s=0.0,
        sharing=profile.sharing,
        workers_at_once=int(found.get("cores", 0)) / max(1, int(found.get("threads", 1))),
        worker=MeasuredWorker(
            profile.prefill.estimate.coefficients,
            profile.decode.estimate.coefficients,
            token_bytes(profile),
            int(found["kv_pages"]) * int(found["block_tokens"]) * token_bytes(profile),
        ),
    )
    return fitted_to(profile.burst, made) if profile.burst.prompt_tokens else made


def fitted_to(burst: BurstMeans, settings: ClusterSettings) -> ClusterSettings:
    """Fit the three costs of concurrency so that the simulated burst, on one prefill and one decode
    worker, takes on average as long as the measured one. The costs are of each prompt while others
    wait, of a concurrent hand-over, and of concurrent decode steps."""
    assert settings.worker is not None
    # The burst was served when it was measured, so its blocks must fit.
    memory_bytes = BURST_BLOCKS * settings.block_tokens * settings.worker.token_bytes
    pair = replace(
        settings,
        prefills=1,
        decodes=1,
        jitter=0.0,
        node_blocks=BURST_BLOCKS,
        max_tokens=burst.output_tokens,
        worker=replace(settings.worker, pages_bytes=memory_bytes),
    )
    prompts = len(burst.prompt_tokens)
    for _ in range(FIT_ROUNDS):
        found = burst_on(pair, burst)
        # All but the first prompt wait for the prompts before, so one second per prompt counts
        # often.
        queued_s = 2.0 * (burst.ttft_s - found.ttft_s) / (prompts + 1)
        gap_s = (burst.first_interval_s - burst.step_s) - (found.first_interval_s - found.step_s)
        beside_prefill = max(1.0, pair.sharing.decode * burst.step_s / found.step_s)
        pair = replace(
            pair,
            queued_prompt_s=max(0.0, pair.queued_prompt_s + queued_s),
            # Both workers compute during most of the hand-overs.
            handover_beside_s=max(0.0, pair.handover_beside_s + gap_s / 2.0),
            sharing=replace(pair.sharing, decode=beside_prefill),
        )
    return replace(
        settings,
        queued_prompt_s=pair.queued_prompt_s,
        sharing=pair.sharing,
        handover_beside_s=pair.handover_beside_s,
    )


def burst_on(pair: ClusterSettings, burst: BurstMeans) -> BurstMeans:
    tokens, block = burst.prompt_tokens, pair.block_tokens
    keys = (key_of(number) for number in itertools.count())
    offered = [
        Offered(
            number, 0.0, length, burst.output_tokens, [next(keys) for _ in range(length // block)]
        )
        for number, length in enumerate(tokens)
    ]
    config = ConductorConfig(admission="none", ttft_slo_s=30.0, tbt_slo_s=1.0)
    jobs = SimulatedFleet(config, pair, pair.gpu()).run(offered)
    steps_s, gaps_s, ttfts_s = [], [], []
    for job in jobs:
        assert job.prefilled_s is not None and job.joined_s is not None, job
        assert job.finished_s is not None, job
        steps_s.append((job.finished_s - job.joined_s) / (burst.output_tokens - 1))
        gaps_s.append(job.joined_s - job.prefilled_s)
        ttfts_s.append(job.prefilled_s - job.arrived_s)
    step_s, ttft_s = statistics.fmean(steps_s), statistics.fmean(ttfts_s)
    first_s = statistics.fmean(gaps_s) + step_s
    return BurstMeans(tokens, burst.output_tokens, ttft_s, first_s, step_s)
