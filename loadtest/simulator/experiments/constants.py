"""The constants of every simulated experiment, in one place, as each report states them.

What models a node (gpu.py) and a cluster (site.py) is named there with its reason and read from
there, so that a report cannot say another number than the one that was used. What belongs to no
model is here: how the coupled baselines are run, and what counts as time to the first token and
as time between tokens.

No experiment has constants of its own. The one that was fitted to the papers' figures, the cost of
each sequence in a decode step, was fitted to Figures 14 and 15 of FAST'25 and to no other.
"""

from __future__ import annotations

from dataclasses import asdict

from loadtest.harness.result import Cell
from loadtest.simulator.cluster import gpu, hardware
from loadtest.simulator.cluster.coupled import CoupledSettings
from loadtest.simulator.cluster.site import ClusterSettings

# The papers do not say how large the chunks of the chunked baseline were: both are run. 512 makes
# it as good between tokens as it can get, 2,048 is what its curve in Figure 1 looks like.
SMALL_CHUNK_TOKENS, LARGE_CHUNK_TOKENS = 512, 2_048
DISPATCH = "round_robin"  # of the baselines: nor do they say which node a request went to
SEQUENCES_MAX = 256  # of a batch, vLLM's default
NODES = 16  # of each system, 8x A800 each

# Both count, to our disadvantage: a user may have the first token when it is computed, and then
# the hand-over is only in the first interval. Rows say what would be without either.
HANDOVER_IN_TTFT = True
FIRST_INTERVAL_IN_TBT = True

PAPER_NODES = ClusterSettings()
REPLAY_SPEED = 1.0  # as recorded, where an experiment is not about other speeds

VLLM = CoupledSettings("vllm", nodes=NODES, dispatch=DISPATCH, sequences_max=SEQUENCES_MAX)
VLLM_CACHED = CoupledSettings(
    "vllm", nodes=NODES, dispatch=DISPATCH, sequences_max=SEQUENCES_MAX, has_prefix_cache=True
)
CHUNKED_SMALL = CoupledSettings(
    "chunked",
    nodes=NODES,
    dispatch=DISPATCH,
    sequences_max=SEQUENCES_MAX,
    chunk_tokens=SMALL_CHUNK_TOKENS,
)
CHUNKED_LARGE = CoupledSettings(
    "chunked",
    nodes=NODES,
    dispatch=DISPATCH,
    sequences_max=SEQUENCES_MAX,
    chunk_tokens=LARGE_CHUNK_TOKENS,
)


def stated(cluster: ClusterSettings = PAPER_NODES) -> dict[str, Cell]:
    """Every constant, as it stands in a report."""
    return {
        **(_measured(cluster) if cluster.worker else _modelled()),
        "chunk_tokens": cluster.chunk_tokens,
        "node_blocks": cluster.node_blocks,
        "block_tokens": cluster.block_tokens,
        "nic_bytes_per_s": cluster.nic_bytes_per_s,
        "host_to_gpu_bytes_per_s": cluster.host_to_gpu_bytes_per_s,
        "ssd_read_bytes_per_s": cluster.ssd_read_bytes_per_s,
        "ssd_write_bytes_per_s": cluster.ssd_write_bytes_per_s,
        "ssd_latency_s": cluster.ssd_latency_s,
        "decode_slots": cluster.decode_slots,
        "jitter": cluster.jitter,
        "baseline_chunk_tokens": f"{SMALL_CHUNK_TOKENS} and {LARGE_CHUNK_TOKENS}",
        "baseline_dispatch": DISPATCH,
        "baseline_sequences_max": SEQUENCES_MAX,
        "handover_in_ttft": HANDOVER_IN_TTFT,
        "first_interval_in_tbt": FIRST_INTERVAL_IN_TBT,
        "replay_speed": REPLAY_SPEED,
    }


def _modelled() -> dict[str, Cell]:
    """Of the paper's node."""
    return {
        "attention_factor": gpu.PAIR_FLOP / 2,  # half of all pairs: attention is causal
        "linear_factor": gpu.TOKEN_FLOP,
        "mfu": gpu.MFU,
        "mbu": gpu.MBU,
        "step_overhead_s": gpu.STEP_OVERHEAD_S,
        "per_sequence_s": gpu.SEQUENCE_S,
        "flop_per_s": hardware.A800.flop_per_s,
        "memory_bytes_per_s": hardware.A800.memory_bytes_per_s,
        "usable_memory_share": gpu.USABLE_SHARE,
    }


def _measured(cluster: ClusterSettings) -> dict[str, Cell]:
    """Of a profile's worker."""
    worker = cluster.worker
    assert worker is not None
    prefill, decode = worker.prefill_coefficients, worker.decode_coefficients
    return {
        **dict(zip(("prefill_base_s", "prefill_token_s", "prefill_pair_s"), prefill, strict=True)),
        **dict(zip(("decode_base_s", "per_sequence_s", "context_token_s"), decode, strict=True)),
        "kv_bytes_per_token": worker.token_bytes,
        "serving_s": cluster.serving_s,
        "handover_s": cluster.handover_s,
        "handover_beside_s": cluster.handover_beside_s,
        "queued_prompt_s": cluster.queued_prompt_s,
        **{f"shared_{name}": factor for name, factor in asdict(cluster.sharing).items()},
    }
