"""What a worker has whichever role it plays: its engine's fingerprint, store, directory, outbox.

A worker that takes another role gets a new incarnation (worker_process.py); what is slow to make or
stands for the engine and its memory stays: the model, the page pool, the store's client with the
pool registered for transfers, and how fast its nodes reach it.

Not here: what belongs to one incarnation (worker_process.py).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from backends.config_pbtxt import WorkerConfig, checkpoint_folder
from backends.errors import ConfigError
from backends.workers.driver import Driver
from backends.workers.protocol import open_outbox
from mooncake_store import layout as kv_layout
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient

MEASURE_S_MAX = 4.0  # for nodes that keep silent when a worker starts, as all others do then


class LastingParts:
    def __init__(
        self,
        config: WorkerConfig,
        repository: str,
        driver: Driver[Any, Any],
        can_flip: bool = False,
    ) -> None:
        folder = checkpoint_folder(config.checkpoint, repository)
        engine = driver.engine
        self.can_flip = can_flip
        self.config = config
        self.context_tokens_max = _context_tokens_max(config, engine.context_tokens_max, folder)
        print_fields = (engine.model_id, engine.weights_id, engine.layout, engine.tp_shape)
        self.directory = DirectoryClient(os.environ["MOONCAKE_DIRECTORY"])
        self.fingerprint = kv_layout.fingerprint(*print_fields)
        self.description = kv_layout.describe(*print_fields)
        self.store = Store(
            self.directory,
            config.store_node,
            self.fingerprint,
            engine.layout,
            config.transport,
            engine.layers,
        )
        self.store.register_buffer(engine.kv_pool)
        self.outbox = open_outbox()
        self.started_at_s = time.time()
        self.has_joined = False  # the cluster, in any role
        self._paths: tuple[dict[str, float], dict[str, float]] | None = None

    def paths(self) -> tuple[dict[str, float], dict[str, float]]:
        """(bytes per second, seconds of a small read) from each node; measured once."""
        if self._paths is None:
            rates = self.store.measure_rates(MEASURE_S_MAX)
            self._paths = rates, self.store.latencies_s()  # as those found them
        return self._paths

    def close(self) -> None:
        """The store keeps what was put."""
        self.outbox.close()
        self.store.close()
        self.directory.close()


def _context_tokens_max(config: WorkerConfig, allowed: int, folder: Path) -> int:
    """Longest prompt and output; raises ConfigError where the checkpoint allows less."""
    asked = config.context_tokens_max
    if asked > allowed:
        raise ConfigError(
            f"context_tokens_max is {asked}, but {folder.name} allows {allowed}; lower it or "
            "leave it 0"
        )
    return min(asked or allowed, config.kv_pages * config.block_tokens)
