"""Prefixes that plain vLLM servers share through the store, without a worker.

When vLLM first asks for a prompt, its whole blocks are looked up in the store and read into pages
of the staging pool. Until then vLLM leaves the prompt in its queue. The prompt is then staged as by
a worker: the ranks load the blocks that were found, and save those that vLLM computes. Saved blocks
are put into the store.

The store only saves time. Whatever it lacks, vLLM computes: a block that is gone or damaged, blocks
of a directory that does not answer, prompts beyond the staging pool.

Threads: vLLM's (`ask`, `finished`), two that look up and read, one that puts, the channel's.
`_lock` guards the jobs and the pool.

Not here: the class that vLLM loads (connector.py), copies (../connected/rank_copies.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, Protocol

from backends.engine.batching.pages import PagePool
from backends.engine.connected.block_pages import POOL, LlmId, place_of
from backends.engine.connected.channel import ChannelError
from backends.engine.connected.host_memory import Bytes
from backends.engine.connected.messages import Stage
from mooncake_store.block_keys import block_keys, chain_seed, packed_tokens
from mooncake_store.errors import StoreError
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.sizes import size_bytes
from mooncake_store.transports.transport import ByteSpan

log = logging.getLogger(__name__)
READERS = 2  # threads that look up and read prefixes
REST_S = 10.0  # after an error of the store, prompts are computed for so long
UNSTAGE_S_MAX = 60.0  # longer than any copy
NOTE_S = 60.0  # between two log lines about a full pool


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """`kv_connector_extra_config` of MooncakeTritonConnector."""

    directory: str = ""  # address of the store's directory; "": that of this user on this host
    node_id: str = ""  # the server's own storage node; "": the first one of this host
    block_tokens: int = 64  # a multiple of vLLM's block size
    pool_bytes: int = 2**30  # host memory for blocks on their way; a number or a text as "1GiB"
    deadline_s: float = 5.0  # a prefix that is read for longer is computed
    tenant: str = ""  # its quota counts the saved blocks

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SharingSettings:
        """Raises ValueError with all mistakes."""
        known = {each.name: each for each in fields(cls)}
        unknown = [name for name in given if name not in known]
        found = [f"{name} is unknown; there are {', '.join(known)}" for name in unknown]
        values = {name: value for name, value in given.items() if name in known}
        if isinstance(text := values.get("pool_bytes"), str):
            try:
                values["pool_bytes"] = int(size_bytes(text))
            except ValueError as error:
                del values["pool_bytes"]
                found.append(f"pool_bytes: {error}")
        for name, value in values.items():
            kind = type(known[name].default)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if kind is str and not isinstance(value, str):
                found.append(f"{name} is {value!r}, not a text")
            elif kind is not str and not (is_number and value > 0 and kind(value) == value):
                found.append(f"{name} is {value!r}, not a positive {kind.__name__}")
        if found:
            raise ValueError("kv_connector_extra_config: " + "; ".join(found))
        return cls(**values)


class Blocks(Protocol):
    """The used part of a StoreClient."""

    def exist(self, keys: Sequence[bytes]) -> list[bool]: ...
    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float
    ) -> list[bool]: ...
    def put(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float
    ) -> list[bool]: ...
    def pending(self) -> list[tuple[ByteArray, ByteSpan]]: ...


class Unstaging(Protocol):
    def unstage(self, request_id: str, timeout_s: float) -> Future[None]: ...


@dataclass(slots=True, eq=False)
class PromptOfVllm:
    """One prompt that vLLM has asked for, until its pages are free."""

    name: LlmId
    keys: list[bytes] = field(default_factory=list)  # of the whole blocks
    pages: list[int] = field(default_factory=list)  # of the pool; one for each block
    needs_tokens: int = 0  # blocks before them are not in the pages: vLLM had them when it asked
    put_blocks: int = 0  # leading blocks that the store has, or that were given to be put
    puts: int = 0  # that have not ended
    is_ready: bool = False  # it is staged, or will never be
    is_staged: bool = False
    is_over: bool = False  # vLLM has ended the request
    is_unused: bool = False  # no copy uses the pages any more


class SharedPrefixes:
    """`stage` adds a stage to the connector's scheduler, and returns its problem or ""."""

    def __init__(
        self,
        settings: SharingSettings,
        client: Blocks,
        fingerprint: str,
        pool: Bytes,
        block_bytes: int,
        stage: Callable[[Stage], str],
    ) -> None:
        self._settings, self._client, self._fingerprint = settings, client, fingerprint
        self._pool, self._block_bytes, self._stage = pool, block_bytes, stage
        self._pages = PagePool(len(pool) // block_bytes)
        self._late: list[int] = []  # pages that a read past its deadline may still write
        self._jobs: dict[LlmId, PromptOfVllm] = {}
        self._lock = threading.Lock()
        self._resting_until_s = self._noted_s = float("-inf")
        self._host: Unstaging | None = None
        self._is_closing = False
        self._readers = ThreadPoolExecutor(READERS, "prefix-reader")
        self._writer = ThreadPoolExecutor(1, "prefix-writer")

    def connect(self, host: Unstaging) -> None:
        self._host = host

    # -- vLLM's thread

    def ask(
        self, name: LlmId, token_ids: Sequence[int], salt: str, local_tokens: int
    ) -> bool | None:
        """True: the prompt is staged, and vLLM has the blocks before those in the pages. False: all
        of it is computed. None: ask again."""
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = self._jobs[name] = PromptOfVllm(name)
                blocks = len(token_ids) // self._settings.block_tokens
                pages = self._taken(blocks) if blocks else None
                if pages is None:
                    job.is_ready = True
                    return False
                job.pages = pages
                tokens = list(token_ids)
                self._readers.submit(self._prepare, job, tokens, salt, local_tokens)
            if not job.is_ready:
                return None
            return job.is_staged and local_tokens >= job.needs_tokens

    def finished(self, name: LlmId) -> None:
        with self._lock:
            job = self._jobs.get(name)
            if job is None or job.is_over:
                return
            job.is_over = True
            is_ready = job.is_ready
        if is_ready:  # otherwise `_prepare` notices it
            self._unstage(job)

    def _taken(self, blocks: int) -> list[int] | None:
        """Pages of the pool, or None. Called with the lock."""
        self._settle()
        pages = self._pages.take(blocks)
        now_s = time.monotonic()
        if pages is None and now_s - self._noted_s >= NOTE_S:
            self._noted_s = now_s
            log.warning(
                "a prompt of %d blocks is computed without the store, because pool_bytes has room "
                "for %d blocks and %d are in use: raise it",
                *(blocks, self._pages.pages_max, self._pages.used_pages),
            )
        return pages

    # -- threads that read

    def _prepare(
        self, job: PromptOfVllm, token_ids: list[int], salt: str, local_tokens: int
    ) -> None:
        problem = ""
        try:
            stage = self._read(job, token_ids, salt, local_tokens)
            problem = self._stage(stage)
        except StoreError as error:
            problem = str(error)
            self._rest(error)
        except Exception as error:  # Catch all: vLLM waits for this prompt
            log.exception("a prefix could not be read")
            problem = repr(error)
        with self._lock:
            job.is_staged = not problem
            job.is_ready = True
            is_over = job.is_over
        if is_over:
            self._unstage(job)

    def _read(self, job: PromptOfVllm, token_ids: list[int], salt: str, local_tokens: int) -> Stage:
        block_tokens = self._settings.block_tokens
        seed = chain_seed(self._fingerprint, cache_salt=salt)
        job.keys = block_keys(token_ids, block_tokens, seed)
        first = min(local_tokens // block_tokens, len(job.keys))
        found = self._found(job.keys)
        arrived = min(first, found)  # vLLM loads none of these
        if found > first:
            targets = [self._page(page) for page in job.pages[first:found]]
            deadline_s = self._settings.deadline_s
            here = self._client.get_into(job.keys[first:found], targets, deadline_s=deadline_s)
            arrived = first + len(list(takewhile(bool, here)))
        job.needs_tokens = first * block_tokens if arrived > first else 0
        job.put_blocks = arrived
        places = [place_of(POOL, page * self._block_bytes) for page in job.pages]
        return Stage(
            str(job.name),
            bytes(packed_tokens(token_ids)),
            salt,
            seed,
            job.keys,
            places,
            arrived * block_tokens if arrived > first else 0,
            saved_tokens_max=len(job.keys) * block_tokens,
        )

    def _found(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that the store has."""
        if time.monotonic() < self._resting_until_s:
            return 0
        return len(list(takewhile(bool, self._client.exist(keys))))

    def _rest(self, error: Exception) -> None:
        log.warning("the store is left alone for %g s: %s", REST_S, error)
        self._resting_until_s = time.monotonic() + REST_S

    def _page(self, page: int) -> Bytes:
        return self._pool[page * self._block_bytes : (page + 1) * self._block_bytes]

    # -- the channel's thread (a Listener)

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        """Nothing: vLLM itself counts what was found."""

    def loaded(self, request_id: str) -> None:
        """Nothing: pages stay until the request ends."""

    def saved(self, request_id: str, tokens: int) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None or self._is_closing:
                return
            whole = tokens // self._settings.block_tokens
            blocks = range(job.put_blocks, min(whole, len(job.keys)))
            if not blocks:
                return
            job.put_blocks = blocks.stop
            job.puts += 1
        self._writer.submit(self._put, job, blocks)

    def broken(self, reason: str) -> None:
        log.error("KV is not shared any more: %s", reason)
        self._resting_until_s = float("inf")

    # -- the thread that puts

    def _put(self, job: PromptOfVllm, blocks: range) -> None:
        try:
            if time.monotonic() >= self._resting_until_s:
                keys = job.keys[blocks.start : blocks.stop]
                sources = [self._page(job.pages[block]) for block in blocks]
                self._client.put(keys, sources, deadline_s=self._settings.deadline_s)
        except StoreError as error:
            self._rest(error)
        except Exception:  # Catch all: the pages are given back in any case
            log.exception("%d blocks were not put into the store", len(blocks))
        finally:
            with self._lock:
                job.puts -= 1
                self._release(job)

    # -- the end of a job

    def _unstage(self, job: PromptOfVllm) -> None:
        """Free the pages when no copy and no put uses them."""
        if not job.is_staged:
            self._left(job)
            return
        assert self._host is not None, "connect comes first"
        try:
            future = self._host.unstage(str(job.name), UNSTAGE_S_MAX)
        except ChannelError as error:
            self._lost(job, error)
        else:
            future.add_done_callback(
                lambda over: self._lost(job, e) if (e := over.exception()) else self._left(job)
            )

    def _left(self, job: PromptOfVllm) -> None:
        with self._lock:
            job.is_unused = True
            self._release(job)

    def _lost(self, job: PromptOfVllm, error: BaseException) -> None:
        """The next user of these pages could get wrong KV."""
        with self._lock:
            if not self._is_closing:
                log.error("%d pages of the staging pool are lost: %s", len(job.pages), error)
            self._jobs.pop(job.name, None)

    def _release(self, job: PromptOfVllm) -> None:
        """Called with the lock."""
        if job.is_unused and not job.puts and self._jobs.pop(job.name, None):
            self._late += job.pages
            self._settle()

    def _settle(self) -> None:
        """Called with the lock."""
        if not self._late:
            return
        pending = set[int]()
        for memory, span in self._client.pending():
            start = memory.ctypes.data - self._pool.ctypes.data + span.offset_bytes
            stop = start + span.length_bytes
            pending.update(range(start // self._block_bytes, -(-stop // self._block_bytes)))
        self._pages.release([page for page in self._late if page not in pending])
        self._late = [page for page in self._late if page in pending]

    @property
    def used_pages(self) -> int:
        with self._lock:
            self._settle()
            return self._pages.used_pages

    def close(self) -> None:
        """Wait for what is under way, and drop the rest."""
        with self._lock:
            self._is_closing = True
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def check(self) -> None:
        with self._lock:
            self._pages.check()
            used = [page for job in self._jobs.values() for page in job.pages] + self._late
            assert len(used) == len(set(used)), "two prompts have a page"
            assert len(used) <= self._pages.used_pages, "a page in use is free"
            assert all(job.puts >= 0 for job in self._jobs.values())
