"""Parts of a worker that outlive a change of its role: clients of store and directory, outbox.

They are slow to create, or belong to the engine's memory. For example, the page pool stays
registered for transfers, and the rates of reads from the store nodes stay known.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from typing import Any

from backends.config_pbtxt import WorkerConfig, checkpoint_folder
from backends.engine.interface import ServingEngine
from backends.errors import ConfigError
from backends.workers.driver import Driver
from backends.workers.protocol import open_outbox
from mooncake_store import layout as kv_layout
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient

log = logging.getLogger(__name__)
MEASURE_S_MAX = 4.0  # longest wait for store nodes that do not answer a rate measurement


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
        self.context_tokens_max = _context_tokens_max(config, engine, folder.name)
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
        self.has_joined = False  # True after the first registration, in any role

    @functools.cached_property
    def paths(self) -> tuple[dict[str, float], dict[str, float]]:
        """({node: bytes per second}, {node: seconds of a small read}). The first use measures."""
        rates = self.store.measure_rates(MEASURE_S_MAX)
        return rates, self.store.latencies_s()  # from the same measurement

    def close(self) -> None:
        self.outbox.close()
        self.store.close()
        self.directory.close()


def _context_tokens_max(config: WorkerConfig, engine: ServingEngine, model: str) -> int:
    """Most tokens of prompt and output. Raises ConfigError if the setting is too large."""
    wanted, kv_tokens = config.context_tokens_max, engine.pages.pages_max * config.block_tokens
    allowed = engine.context_tokens_max  # of the model, or of the KV memory if it is smaller
    is_kv_short = kv_tokens <= allowed
    if wanted > allowed:
        what = "the KV memory" if is_kv_short else model
        remedy = "raise kv_bytes or lower it" if is_kv_short else "lower it or leave it 0"
        raise ConfigError(
            f"context_tokens_max is {wanted}, but {what} allows {allowed} tokens; {remedy}"
        )
    if is_kv_short and not wanted:
        log.info("KV memory limits prompt and output to %d tokens; raise kv_bytes", kv_tokens)
    return min(wanted or allowed, kv_tokens)
