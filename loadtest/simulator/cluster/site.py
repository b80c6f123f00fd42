"""What every node of a simulated cluster shares."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.simulator.cluster.clock import Clock
from loadtest.simulator.cluster.cores import Cores
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.settings import Settings
from loadtest.simulator.cluster.store import SimulatedStore
from loadtest.simulator.gpu.steps import GpuModel


@dataclass(frozen=True, slots=True)
class Site:
    clock: Clock
    store: SimulatedStore
    network: Network
    gpu: GpuModel
    settings: Settings
    cores: Cores

    @property
    def block_bytes(self) -> int:
        return self.settings.block_tokens * self.gpu.token_bytes

    @property
    def pages_max(self) -> int:
        """Blocks of KV that a GPU has memory for."""
        return self.gpu.pages_bytes // self.block_bytes
