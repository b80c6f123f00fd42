"""What a worker is to a plan: how fast it is, what it holds, and how it is configured.

Either a published node with a published model (`NodeEngine`), or what `mooncake profile` measured.

Not here: the numbers of nodes and models (simulator/cluster/hardware.py), seconds of a step
(simulator/cluster/gpu.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from loadtest.harness.result import Cell
from loadtest.simulator.cluster import gpu
from loadtest.simulator.cluster.gpu import GpuModel, Roofline
from loadtest.simulator.cluster.hardware import HARDWARE, MODELS, GpuNode, LlmModel
from loadtest.simulator.cluster.site import ClusterSettings

DRAM_SHARE = 0.9  # of a node's DRAM, for KV: 983 GB of the paper's 1 TB are more
GIGA = 10**9
T = TypeVar("T")


class PlanRefused(Exception):
    """Nothing is planned; the message says what to change."""


class PlannedEngine(Protocol):
    """Decides a run, so it is shown whole when it is printed (runs.py)."""

    @property
    def name(self) -> str: ...
    @property
    def node_blocks_max(self) -> int: ...
    def gpu(self) -> GpuModel: ...
    def settings(self) -> ClusterSettings: ...
    def stated(self) -> dict[str, Cell]: ...
    def parameters(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """TensorRT-LLM over all GPUs of a node."""

    node: GpuNode
    model: LlmModel

    @classmethod
    def named(cls, hardware: str, model: str, gpus: int | None = None) -> NodeEngine:
        """PlanRefused for a name that nobody knows, and for a model that does not fit."""
        node = _known(HARDWARE, hardware, "hardware")
        engine = cls(replace(node, gpus=gpus or node.gpus), _known(MODELS, model, "model"))
        engine.refuse_too_large()
        return engine

    def refuse_too_large(self) -> None:
        node, model = self.node, self.model
        usable_bytes = node.memory_bytes * gpu.USABLE_SHARE
        if model.weight_bytes < usable_bytes:
            return
        needed = math.floor(model.weight_bytes / node.gpu_memory_bytes / gpu.USABLE_SHARE) + 1
        raise PlanRefused(
            f"{model.name} does not fit: its weights are {model.weight_bytes / GIGA:.0f} GB, and "
            f"{node.gpus} x {node.name} have {usable_bytes / GIGA:.0f} GB for weights and KV. It "
            f"needs at least {needed} of them: --gpus {needed}"
        )

    @property
    def name(self) -> str:
        return f"{self.model.name} on {self.node.gpus} x {self.node.name}"

    @property
    def node_blocks_max(self) -> int:
        block_bytes = self.settings().block_tokens * self.model.token_bytes
        return int(self.node.dram_bytes * DRAM_SHARE / block_bytes)

    def gpu(self) -> GpuModel:
        return Roofline(self.node, self.model)

    def settings(self) -> ClusterSettings:
        return ClusterSettings(
            nic_bytes_per_s=self.node.nic_bytes_per_s,
            host_to_gpu_bytes_per_s=self.node.pcie_bytes_per_s,
        )

    def stated(self) -> dict[str, Cell]:
        """What the plan hangs on, as a report says it."""
        node, model = self.node, self.model
        return {
            "engine": self.name,
            "flop_per_s": node.flop_per_s,
            "memory_bytes_per_s": node.memory_bytes_per_s,
            "memory_bytes": node.memory_bytes,
            "dram_bytes": node.dram_bytes,
            "nic_bytes_per_s": node.nic_bytes_per_s,
            "kv_bytes_per_token": model.token_bytes,
            "weight_bytes": model.weight_bytes,
            "mfu": gpu.MFU,
            "mbu": gpu.MBU,
            "step_overhead_s": round(gpu.STEP_OVERHEAD_S * model.layers / 80, 6),
            "per_sequence_s": round(gpu.SEQUENCE_S * model.layers / 80, 6),
        }

    def parameters(self) -> Mapping[str, str]:
        """Of each worker's config.pbtxt."""
        return {
            "engine": "tensorrt_llm", "device": "cuda", "dtype": "bfloat16",
            "tp_size": str(self.node.gpus), "checkpoint": f"checkpoints/{self.model.name}",
        }  # fmt: skip


def _known(known: Mapping[str, T], name: str, what: str) -> T:
    for each, found in known.items():
        if each.lower() == name.lower():
            return found
    raise PlanRefused(f"no {what} {name!r}; there are {', '.join(known)}, or measure your own: "
                      "`mooncake profile --out FILE`, then --profile FILE")  # fmt: skip
