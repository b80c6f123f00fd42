"""A worker of a plan: its speed, its capacity, and its configuration.

It is a published node with a published model (`NodeEngine`), or a worker that `mooncake profile`
measured.

A node holds `node_bytes` of KV; the default is most of its DRAM, or the default of `mooncake
serve`.

Not here: the numbers of nodes and models (simulator/cluster/hardware.py), seconds of a step
(simulator/cluster/gpu.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from loadtest.harness.result import Cell
from loadtest.profile.profile import OF_ENGINE, Profile
from loadtest.simulator.cluster import gpu
from loadtest.simulator.cluster.gpu import GpuModel, Roofline
from loadtest.simulator.cluster.hardware import HARDWARE, MODELS, GpuNode, LlmModel
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.profiled import read_profile, settings_of

DRAM_SHARE = 0.9  # share of a node's DRAM for KV
GIGA = 10**9
NODE_BYTES = 2**30  # default of `mooncake serve --store-bytes`
REPORT_S = 0.5  # between reports of a real worker
PRICES = (  # costs besides the steps, for people
    "serving_s",
    "handover_s",
    "handover_beside_s",
    "queued_prompt_s",
    "workers_at_once",
)
T = TypeVar("T")


class PlanRefused(Exception):
    """Nothing is planned; the message names the option to change."""


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """TensorRT-LLM over all GPUs of a node."""

    node: GpuNode
    model: LlmModel
    node_bytes: int = 0  # of KV in its DRAM; 0: most of it

    @classmethod
    def named(
        cls, hardware: str, model: str, gpus: int | None = None, node_bytes: int = 0
    ) -> NodeEngine:
        """PlanRefused for an unknown name, and for a model that does not fit."""
        node = _known(HARDWARE, hardware, "hardware")
        node = replace(node, gpus=gpus or node.gpus)
        engine = cls(node, _known(MODELS, model, "model"), node_bytes)
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
        node_bytes = self.node_bytes or self.node.dram_bytes * DRAM_SHARE
        return int(node_bytes / (self.settings().block_tokens * self.model.token_bytes))

    def gpu(self) -> GpuModel:
        return Roofline(self.node, self.model)

    def settings(self) -> ClusterSettings:
        return ClusterSettings(
            nic_bytes_per_s=self.node.nic_bytes_per_s,
            host_to_gpu_bytes_per_s=self.node.pcie_bytes_per_s,
        )

    def stated(self) -> dict[str, Cell]:
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
        """Parameters of each worker's config.pbtxt."""
        return {
            "engine": "tensorrt_llm",
            "device": "cuda",
            "dtype": "bfloat16",
            "tp_size": str(self.node.gpus),
            "checkpoint": f"checkpoints/{self.model.name}",
        }


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """Workers like the measured one, each on the machine where it was measured."""

    name: str
    measured: ClusterSettings  # computed once: costs are fitted to the profile's burst
    node_bytes: int
    configured: tuple[tuple[str, str], ...]  # parameters of its config.pbtxt
    facts: tuple[tuple[str, Cell], ...]  # of the profile, for people

    @classmethod
    def read(cls, path: Path, node_bytes: int = 0) -> MeasuredEngine:
        """PlanRefused for a file that is no profile."""
        try:
            return cls.of(read_profile(path), node_bytes)
        except (OSError, ValueError) as problem:
            raise PlanRefused(f"--profile {path}: {problem}") from None
        except KeyError as missing:
            raise PlanRefused(f"--profile {path}: {missing} of its worker is missing") from None

    @classmethod
    def of(cls, profile: Profile, node_bytes: int = 0) -> MeasuredEngine:
        """Clients request as many tokens as they receive, as in a replay."""
        prefill, decode, said = profile.prefill, profile.decode, profile.settings
        block_tokens = int(said["block_tokens"])
        # Without a configured chunk size: the simulator's, in whole blocks.
        chunk_tokens = max(1, ClusterSettings().chunk_tokens // block_tokens) * block_tokens
        shape = ClusterSettings(
            block_tokens=block_tokens, chunk_tokens=chunk_tokens, max_tokens=1, report_s=REPORT_S
        )
        measured = settings_of(profile, shape)
        facts: dict[str, Cell] = {
            "prefill_coefficients": str(list(prefill.estimate.coefficients)),
            "decode_coefficients": str(list(decode.estimate.coefficients)),
            "prefill_error_mean": round(prefill.error_mean, 4),
            "decode_error_mean": round(decode.error_mean, 4),
            **{name: round(getattr(measured, name), 5) for name in PRICES},
            **{f"shared_{name}": round(n, 5) for name, n in asdict(measured.sharing).items()},
        }
        return cls(
            f"{said.get('checkpoint', 'a worker')} on {profile.machine}",
            measured,
            node_bytes or NODE_BYTES,
            tuple((name, said[name]) for name in OF_ENGINE if name in said),
            tuple(facts.items()),
        )

    @property
    def node_blocks_max(self) -> int:
        return int(self.node_bytes / (self.measured.block_tokens * self.gpu().token_bytes))

    def gpu(self) -> GpuModel:
        return self.measured.gpu()

    def settings(self) -> ClusterSettings:
        return self.measured

    def stated(self) -> dict[str, Cell]:
        return {"engine": self.name, "node_bytes": self.node_bytes, **dict(self.facts)}

    def parameters(self) -> Mapping[str, str]:
        return dict(self.configured)


PlannedEngine = NodeEngine | MeasuredEngine  # its repr names a run (runs.py)


def _known(known: Mapping[str, T], name: str, what: str) -> T:
    for each, found in known.items():
        if each.lower() == name.lower():
            return found
    raise PlanRefused(
        f"no {what} {name!r}; there are {', '.join(known)}, or measure your own: "
        "`mooncake profile --out FILE`, then --profile FILE"
    )
