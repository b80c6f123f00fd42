"""The shape of a simulated cluster, with the reason for each number. One set for everything.

Not here: what the conductor is told (ConductorConfig), the GPUs (gpu/).
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.replay.trace import TRACE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Settings:
    prefills: int = 8  # the paper does not say how its 16 nodes are split; its best is near 1:1
    decodes: int = 8
    seed: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    # 3 M tokens of KV in a node's DRAM (Fig 10): 3 M * 320 KiB = 983 GB, a host of 1 TB.
    node_blocks: int = 5_859
    eviction: str = "density"  # the directory's default
    # A prefill step. The paper: prefill_chunk is "larger than 1,000 tokens".
    chunk_tokens: int = 2_048
    waiting_max: int = 100_000  # prompts in a prefill queue: the conductor rejects, not the worker
    decode_slots: int = 256  # vLLM's max_num_seqs
    max_tokens: int = 2_000  # what clients ask for; the longest answer of the conversation trace
    nic_bytes_per_s: float = 100e9  # 800 Gb/s
    nic_latency_s: float = 0.001
    host_to_gpu_bytes_per_s: float = 128e9  # B_h2d of the paper
    report_s: float = 1.0  # between a worker's reports
    tick_s: float = (
        0.5  # between housekeeping of the conductor, as in backends/frontend/cluster_view.py
    )
    # How much slower a step is while the other role computes on the same cores (cores.py).
    shared_prefill: float = 1.0
    shared_decode: float = 1.0
    jitter: float = 0.05  # each step takes up to so much more or less than the model says
    steps_at_once: int = 0  # most decode steps taken together; 0: as many as are alike
    attempts_max: int = 3  # tries of a request whose worker was lost

    def __post_init__(self) -> None:
        assert self.chunk_tokens % self.block_tokens == 0, "a chunk would end inside a block"
        assert min(self.prefills, self.decodes, self.node_blocks) > 0
        assert 0 <= self.jitter < 1
