"""Records of storage nodes and workers, as they register and report.

An *incarnation* is one start of a process (a new random name each time), so a restarted node or a
reloaded worker is never confused with the earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT_BYTES = 4096  # default and least unit of allocation: a memory page
SSD_SUFFIX = "/ssd"  # the SSD holder of node "s0" is "s0/ssd"


@dataclass(frozen=True, slots=True)
class NicAgent:
    """A NIXL agent of a node that uses a single network card (NIC) of its host."""

    nic: str  # name of the network interface on that host
    agent_name: str
    agent_metadata: bytes
    addresses: tuple[str, ...] = ()  # IP addresses of the card
    networks: tuple[str, ...] = ()  # their networks, as in "10.78.0.0/24"
    port: int = 0  # TCP port of the agent; 0: unknown
    has_rdma: bool = False


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One incarnation of a holder, as its storage node registers it. A node with an SSD registers
    twice: "s0" of tier "dram" and "s0/ssd" of tier "ssd"."""

    node_id: str
    incarnation: str
    host_id: str  # nodes with the same host_id can map each other's segments
    segment_path: str  # file with the memory (tier "dram") or the blocks (tier "ssd")
    segment_bytes: int
    agent_name: str  # name of its NIXL agent; empty when the node runs without NIXL
    agent_metadata: bytes
    base_address: int  # of the segment in the node's process, for NIXL
    unit_bytes: int = UNIT_BYTES  # unit of allocation in bytes, see slots.py
    tier: str = "dram"  # "dram" | "ssd"
    control: str = ""  # ZeroMQ address of the node's control socket; "" without one
    data_address: str = ""  # HOST:PORT of its plain TCP server; "" without one
    rack: str = ""  # operator's label; nodes with the same label have a short network path
    topology: str = ""  # JSON from host_topology.py
    has_inventory: bool = False  # the node sends its inventory (adopt) before it takes blocks
    nics: tuple[NicAgent, ...] = ()  # agents for other hosts; empty: use agent_name
    is_agent_local: bool = False  # whether the configuration limits agent_name to this host
    index_path: str = ""  # index replica of its host (index_table.py); "" without one

    @property
    def is_ssd(self) -> bool:
        return self.tier == "ssd"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a prefill or decode worker, as it registers."""

    worker_id: str  # the name of its Triton model
    incarnation: str
    role: str  # "prefill" | "decode"
    node_id: str
    fingerprint: str
    description: str  # the fields of the fingerprint, see layout.describe
    inbox: str  # ZeroMQ address of the worker's PULL socket
    block_tokens: int
    block_bytes: int
    context_tokens_max: int
    pages_max: int
    slots_max: int  # request slots: concurrent requests
    # Coefficients of step times, see conductor/estimates/estimates.py; (): not calibrated.
    prefill_coefficients: tuple[float, ...]
    decode_coefficients: tuple[float, ...]
    # node_id -> rate of reads from the node, measured at the worker's start.
    transfer_bytes_per_s: dict[str, float]
    # node_id -> latency of one small read, measured with the rates.
    transfer_latency_s: dict[str, float]
    grpc_address: str = ""  # HOST:PORT of the Triton that serves the worker; "" without one
    # Whether the engine transfers KV itself, so that prompts need no memory of the storage node.
    is_native: bool = False
    # Whether a shorter prompt overtakes one that has begun, between two of its chunks. Some engines
    # finish each prompt that they have begun.
    preempts_prompts: bool = True
    can_flip: bool = False  # whether the worker can drain and register in the other role
    # Prefill workers with the same group name compute a share of the layers each, as pipeline
    # stages 0 to pipeline_stages - 1. Frontends call stage 0. "": this worker has all layers.
    pipeline_group: str = ""
    pipeline_stage: int = 0
    pipeline_stages: int = 1
    pipeline_hop_s: float = 0.0  # seconds to receive a chunk's hidden states; 0: not measured
    chunk_tokens: int = 0  # most new tokens of a prefill step; 0: unknown
    # Share of the computation that overlaps with the load of the prefix, for prompts longer than
    # chunk_tokens: 1 - 1/layers with layer-wise prefill. 0: the load precedes the computation.
    load_beside_share: float = 0.0

    @property
    def is_called(self) -> bool:
        """Whether frontends call this worker. They do not call later stages of a pipeline."""
        return not self.pipeline_group or self.pipeline_stage == 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Report of a worker, sent every 0.5 s, and at once before it changes its role."""

    worker_id: str
    incarnation: str
    queue_requests: int
    queue_tokens: int  # uncached prompt tokens not yet computed, including the running request
    running: int  # running requests
    pages_used: int  # pages of unfinished requests, and pages that may still be written
    context_tokens: int  # KV tokens of the running decodes
    step_s: float  # recent mean seconds of a prefill step, or of a decode step (current batch)
    is_draining: bool
    oldest_step_s: float = 0.0  # age of the engine's current step; 0: no step is running
