"""Clusters of workers like the one that `mooncake profile` measured.

Steps take what the fits say, instead of the roofline of a GPU; a cached prefix comes from the
worker's own memory, from another node or from the SSD at the file's rates; the ways of a request
through the frontend and from prefill to decode, and how much slower steps are while the other role
computes on the same cores, are the file's too. What the file did not measure is as in any cluster
(site.py).

Not here: measuring, and the file's format (loadtest/profile).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loadtest.profile.profile import Profile
from loadtest.simulator.cluster.gpu import MeasuredWorker
from loadtest.simulator.cluster.site import ClusterSettings

NO_TIME_BYTES_PER_S = 1e12  # where loading was too quick to be measured


def read_profile(path: Path) -> Profile:
    """ValueError or OSError, with the reason, when it cannot be read."""
    return Profile.from_json(path.read_text())


def token_bytes(profile: Profile) -> int:
    return int(profile.settings["token_bytes"])


def settings_of(profile: Profile, settings: ClusterSettings) -> ClusterSettings:
    """`settings` with everything that the file says instead."""
    serving, sources, found = profile.serving, profile.sources, profile.settings
    load_s, load_bytes = serving.per_cached_token_s, token_bytes(profile)
    return replace(
        settings,
        block_tokens=int(found["block_tokens"]),
        chunk_tokens=int(found.get("chunk_tokens", settings.chunk_tokens)),
        decode_slots=int(found.get("slots", settings.decode_slots)),
        host_to_gpu_bytes_per_s=load_bytes / load_s if load_s else NO_TIME_BYTES_PER_S,
        nic_bytes_per_s=sources.node_bytes_per_s or settings.nic_bytes_per_s,
        nic_latency_s=0.0,  # the file's gaps and rates have it in them
        ssd_read_bytes_per_s=sources.ssd_bytes_per_s or settings.ssd_read_bytes_per_s,
        ssd_write_bytes_per_s=sources.ssd_bytes_per_s or settings.ssd_write_bytes_per_s,
        serving_s=serving.base_s,
        handover_s=serving.handover_s,
        handover_beside_s=max(serving.handover_s, serving.handover_beside_s),
        queued_prompt_s=serving.queued_prompt_s,
        shared_prefill=profile.sharing.prefill,
        shared_decode=profile.sharing.decode,
        worker=MeasuredWorker(
            profile.prefill.estimate.coefficients, profile.decode.estimate.coefficients,
            token_bytes(profile),
            int(found["kv_pages"]) * int(found["block_tokens"]) * token_bytes(profile),
        ),
    )  # fmt: skip
