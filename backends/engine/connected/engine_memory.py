"""What a worker and the processes of its engine share: the staging pool, and the channel.

The pool is made before the engine starts, and the ranks report the size of their pages when it has
started. `check_ranks` compares both.

Not here: the messages of the channel (messages.py), starting an engine (the folder of the engine).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

from backends.engine.connected.channel import ChannelError, ConnectorHost, Listener
from backends.engine.connected.host_memory import Bytes, PoolProblem, StagingPool
from backends.engine.connected.messages import Site
from backends.errors import ConfigError
from mooncake_store.layout import KvLayout

log = logging.getLogger(__name__)
NAME_CHARACTERS_MAX = 16  # of a worker, in the path of its channel
READY_S_MAX = 60.0  # after the engine has started; usually its connectors have reported by then


def ipc_address(kind: str, worker_id: str) -> str:
    """In the folder of this launch. A name that is too long for a socket's path is replaced by its
    hash."""
    hashed = hashlib.blake2b(worker_id.encode(), digest_size=6).hexdigest()
    name = worker_id if len(worker_id) <= NAME_CHARACTERS_MAX else hashed
    return f"ipc://{os.environ['MOONCAKE_SOCKETS']}/{kind}-{name}-{os.getpid()}"


class EngineMemory:
    def __init__(self, worker_id: str, layout: KvLayout, pages: int) -> None:
        """Raises ConfigError if the pool does not fit."""
        self.layout = layout
        self._worker_id = worker_id
        self._host: ConnectorHost | None = None
        run = Path(os.environ["MOONCAKE_SOCKETS"]).name
        try:
            self._pool = StagingPool(run, worker_id, pages, layout.block_bytes)
        except PoolProblem as error:
            raise ConfigError(str(error)) from error

    @property
    def bytes(self) -> Bytes:
        return self._pool.bytes

    @property
    def host(self) -> ConnectorHost:
        assert self._host is not None, "this engine has no connector"
        return self._host

    def listen(self, listener: Listener, aside_bytes_min: int) -> Site:
        """Listen to connectors, which need the result in their environment. Called before the
        engine starts, because they report during its start."""
        address = ipc_address("kv", self._worker_id)
        self._host = ConnectorHost(address, listener)
        layout = self.layout
        return Site(
            address,
            str(self._pool.path),
            layout.block_tokens,
            layout.block_bytes,
            aside_bytes_min,
            is_alike=layout.kv_factor == 1,
        )

    def check_ranks(self, engine: str, tp_size: int, tokens_max: int) -> int:
        """Wait for the ranks. Returns the tokens of a page of the engine. `tokens_max`: of a
        request. Raises ConfigError if their KV is not that of the layout, or too little."""
        ranks = self.host.wait_ready(READY_S_MAX)
        by_rank = [rank.rank_bytes for rank in ranks]
        block_bytes = max(by_rank) if self.layout.kv_factor == 1 else sum(by_rank)
        if len(ranks) != tp_size or block_bytes != self.layout.block_bytes:
            raise ConfigError(
                f"a block has {block_bytes} bytes over {len(ranks)} rank(s) in {engine}, but "
                f"{self.layout.block_bytes} over {tp_size} by config.json and dtype: "
                "is KV kept in another dtype than that (kv_dtype)?"
            )
        found = {rank.tokens_per_block for rank in ranks}
        if len(found) != 1:
            raise ConfigError(f"the ranks of {engine} have pages of different sizes: {found}")
        (page_tokens,) = found
        self._check_room(engine, min(rank.gpu_pages for rank in ranks) * page_tokens, tokens_max)
        return page_tokens

    def _check_room(self, engine: str, there: int, tokens_max: int) -> None:
        """An engine allocates fewer pages than asked if its device has no room for them."""
        promised = len(self._pool.bytes) // self.layout.block_bytes * self.layout.block_tokens
        said = f"{engine} has pages for {there} tokens on its device, kv_bytes promises {promised}"
        if there < tokens_max:
            raise ConfigError(f"{said}, and a request may have {tokens_max}: lower both")
        if there < promised:
            log.warning("%s: requests will wait inside the engine; lower kv_bytes", said)

    def reason_of(self, error: BaseException, engine: str) -> str:
        """The reason that the connector reported, rather than its consequence."""
        if self._host is not None:
            try:
                self._host.wait_ready(0.0)
            except ChannelError as said:
                if "did not report" not in str(said):
                    return str(said)
        return f"{engine} did not start: {type(error).__name__}: {error}"

    def close(self) -> None:
        """The engine has ended: its processes use both."""
        with contextlib.ExitStack() as steps:  # closes each, also after an exception
            steps.callback(self._pool.close)
            if self._host is not None:
                steps.callback(self._host.close)
