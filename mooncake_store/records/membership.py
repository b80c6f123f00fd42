"""Who takes part: what storage nodes and workers say of themselves. Records only.

An *incarnation* is one start of a process (a fresh random name each time), so a restarted node
or a reloaded worker is never mistaken for the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT_BYTES = 4096  # where nothing else is said: a memory page
SSD_SUFFIX = "/ssd"  # the SSD holder of node "s0" is "s0/ssd"


@dataclass(frozen=True, slots=True)
class NicAgent:
    """A NIXL agent of a node that moves bytes over one network card (NIC) of its host only."""

    nic: str  # the name of the interface there
    agent_name: str
    agent_metadata: bytes
    addresses: tuple[str, ...] = ()  # IP addresses of the card
    networks: tuple[str, ...] = ()  # their networks, as in "10.78.0.0/24"
    port: int = 0  # where the agent listens for TCP; 0: it is not known
    has_rdma: bool = False


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One incarnation of a holder, as its storage node registers it with the directory.

    A node with an SSD registers twice: "s0" of tier "dram" and "s0/ssd" of tier "ssd".
    """

    node_id: str
    incarnation: str
    host_id: str  # nodes with one host_id can map each other's segments
    segment_path: str
    segment_bytes: int
    agent_name: str  # NIXL; empty when the node serves mapped memory only
    agent_metadata: bytes
    base_address: int  # of the segment in the node's process, for NIXL
    unit_bytes: int = UNIT_BYTES  # the grain of its memory, see slots.py
    tier: str = "dram"  # "dram" | "ssd"
    control: str = ""  # ZeroMQ address of the node's control socket; "" when it has none
    data_address: str = ""  # host:port of its plain TCP server; "" when it has none
    rack: str = ""  # a label of the operator's; nodes with one label are near each other
    topology: str = ""  # what host_topology.py found, as JSON
    has_inventory: bool = False  # it will say what it holds (adopt) before it takes blocks
    nics: tuple[NicAgent, ...] = ()  # agents for other hosts; empty: agent_name serves those too
    is_agent_local: bool = False  # agent_name serves this host only, as the operator wishes
    index_path: str = ""  # of the index replica of its host (index_table.py); "" without one

    @property
    def is_ssd(self) -> bool:
        return self.tier == "ssd"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a prefill or decode worker, as it registers with the directory."""

    worker_id: str  # the name of its Triton model
    incarnation: str
    role: str  # "prefill" | "decode"
    node_id: str
    fingerprint: str
    description: str  # the fields behind the fingerprint, see layout.describe
    inbox: str  # ZeroMQ address of the worker's own PULL socket
    block_tokens: int
    block_bytes: int
    context_tokens_max: int
    pages_max: int
    slots_max: int  # requests at once
    prefill_coefficients: tuple[float, ...]
    decode_coefficients: tuple[float, ...]
    transfer_bytes_per_s: dict[str, float]  # from node_id; measured when the worker starts
    transfer_latency_s: dict[str, float]  # of one small read, from node_id; measured with the rates
    grpc_address: str = ""  # HOST:PORT of the Triton that serves it; "" when it cannot be called
    is_native: bool = False  # its engine hands KV over by itself: its node need not hold a prompt
    can_flip: bool = False  # told to, it drains and registers in the other role
    # A pipeline group is the prefill workers of one name, each with a share of the layers: stages 0
    # to pipeline_stages - 1. Frontends call stage 0 only. "": it has all layers itself.
    pipeline_group: str = ""
    pipeline_stage: int = 0
    pipeline_stages: int = 1
    pipeline_hop_s: float = 0.0  # a chunk's hidden states from the stage before; 0: not measured
    chunk_tokens: int = 0  # most new tokens of a prefill step; 0: not said
    # A prompt longer than a step passes layer by layer: so much of its computing is beside the load
    # of its prefix, which is all but the first layer's. 0: it is loaded, then computed.
    load_beside_share: float = 0.0

    @property
    def is_called(self) -> bool:
        """By frontends: it is no later stage of a pipeline group."""
        return not self.pipeline_group or self.pipeline_stage == 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of itself, every second and at each change that matters."""

    worker_id: str
    incarnation: str
    queue_requests: int
    queue_tokens: int  # uncached prompt tokens still to compute, the running request's included
    running: int  # requests
    pages_used: int  # by requests that have not ended, and what may still be written
    context_tokens: int  # KV tokens of the running decodes
    step_s: float  # mean seconds of a prefill step lately; of a decode step with this batch
    is_draining: bool
    oldest_step_s: float = 0.0  # how long the engine's step has been under way; 0: there is none
