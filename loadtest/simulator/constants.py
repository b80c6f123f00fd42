"""The constants of a simulated run, as each report states them.

Reports read them from the models (cluster/gpu.py, cluster/site.py), which give the reason of each.
"""

from __future__ import annotations

from dataclasses import asdict

from loadtest.harness.result import Cell
from loadtest.simulator.cluster import gpu, hardware
from loadtest.simulator.cluster.site import ClusterSettings

PAPER_NODES = ClusterSettings()


def stated(cluster: ClusterSettings = PAPER_NODES) -> dict[str, Cell]:
    """Every constant of the models, by name."""
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
    }


def _modelled() -> dict[str, Cell]:
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
