"""Prefixes that plain vLLM servers share through the store, without a worker.

When vLLM first asks for a prompt, its whole blocks are looked up in the store and read into pages
of the staging pool. Until then vLLM leaves the prompt in its queue. The prompt is then staged as by
a worker: the ranks load the blocks that were found, and save the blocks after them. Saved blocks
are put into the store. The pages are free when the last block is saved, or loaded if all were
found.

A failure costs time only, because vLLM computes what is missing. Examples are a damaged block, a
directory that does not answer, and a prompt for which the pool has no room in time.

Threads: vLLM's (`ask`, `finished`), two that look up and read, one that puts, the channel's.
`_lock` guards the jobs and the pool. vLLM's thread calls nothing that waits.

Not here: the class that vLLM loads (connector.py), copies (../connected/rank_copies.py).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
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
TRANSFER_CONFIG = {  # vLLM's kv_transfer_config
    "kv_connector": "MooncakeTritonConnector",
    "kv_connector_module_path": "backends.engine.plain_vllm.connector",
    "kv_role": "kv_both",
}
BLOCK_TOKENS_MIN = 64
READERS = 2  # threads that look up and read prefixes
PAUSE_S = 10.0  # after an error of the store, prompts are computed for so long
UNSTAGE_S_MAX = 60.0  # longer than any copy
STAGE_S_MAX = 10.0  # the scheduler's other thread takes a stage at once
NOTE_S = 60.0  # between two log lines about a full pool


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """`kv_connector_extra_config` of MooncakeTritonConnector."""

    directory: str = ""  # address of the store's directory; "": that of this user on this host
    node_id: str = ""  # the server's own storage node; "": the first one of this host
    # Tokens of a block of the store, a multiple of vLLM's block size. 0: the least one that is
    # BLOCK_TOKENS_MIN or more.
    block_tokens: int = 0
    # Host memory for blocks while they are read, loaded and saved; a number, or a text as "1GiB".
    pool_bytes: int = 2**30
    deadline_s: float = 5.0  # a prompt waits at most so long for pages and for its prefix
    tenant: str = ""  # its quota counts the saved blocks

    def of_pages(self, page_tokens: int) -> SharingSettings:
        """With `block_tokens` for a vLLM whose blocks have `page_tokens`."""
        pages = -(-BLOCK_TOKENS_MIN // page_tokens)
        return replace(self, block_tokens=self.block_tokens or pages * page_tokens)

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
        for name, value in list(values.items()):
            kind = type(known[name].default)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if kind is str and not isinstance(value, str):
                found.append(f"{name} is {value!r}, not a text")
            elif kind is not str and not (is_number and value > 0 and kind(value) == value):
                found.append(f"{name} is {value!r}, not a positive {kind.__name__}")
            else:
                values[name] = kind(value)
        if found:
            raise ValueError("kv_connector_extra_config: " + "; ".join(found))
        return cls(**values)


class BlockClient(Protocol):
    """The used part of a StoreClient."""

    def exist(self, keys: Sequence[bytes]) -> list[bool]: ...
    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float
    ) -> list[bool]: ...
    def put(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float
    ) -> list[bool]: ...
    def pending(self) -> list[tuple[ByteArray, ByteSpan]]: ...


class StageHost(Protocol):
    """The used part of a ConnectorHost."""

    def stage(self, stage: Stage, timeout_s: float) -> Future[None]: ...
    def unstage(self, request_id: str, timeout_s: float) -> Future[None]: ...


@dataclass(slots=True, eq=False)
class PromptOfVllm:
    """One prompt that vLLM has asked for, until vLLM has ended it and its pages are free."""

    name: LlmId
    asked_s: float  # time of the first question (monotonic)
    keys: list[bytes] = field(default_factory=list)  # of the whole blocks
    pages: list[int] = field(default_factory=list)  # of the pool; one for each block
    needs_tokens: int = 0  # blocks before them are not in the pages: vLLM had them when it asked
    found_blocks: int = 0  # leading blocks that the store has
    put_blocks: int = 0  # leading blocks that the store has, or that were given to be put
    puts: int = 0  # that have not ended
    is_reading: bool = False
    is_ready: bool = False  # it is staged, or will never be
    is_staged: bool = False
    is_leaving: bool = False  # nothing more is loaded or saved for it
    is_over: bool = False  # vLLM has ended the request


class SharedPrefixes:
    def __init__(
        self,
        settings: SharingSettings,
        client: BlockClient,
        fingerprint: str,
        pool: Bytes,
        block_bytes: int,
    ) -> None:
        self._settings, self._client, self._fingerprint = settings, client, fingerprint
        self._pool, self._block_bytes = pool, block_bytes
        self._pages = PagePool(len(pool) // block_bytes)
        self._settling: Future[None] = Future()
        self._settling.set_result(None)
        self._late: list[int] = []  # pages that a read past its deadline may still write
        self._jobs: dict[LlmId, PromptOfVllm] = {}
        self._lock = threading.Lock()
        self._paused_until_s = self._noted_s = float("-inf")
        self._epoch = ""  # another one after `reset`
        self._is_closing = False
        self._host: StageHost | None = None
        self._readers = ThreadPoolExecutor(READERS, "prefix-reader")
        self._writer = ThreadPoolExecutor(1, "prefix-writer")

    def connect(self, host: StageHost) -> None:
        self._host = host

    # -- vLLM's thread

    def ask(
        self, name: LlmId, token_ids: Sequence[int], salt: str, local_tokens: int
    ) -> bool | None:
        """True: the prompt is staged, and vLLM has the blocks before those in the pages. False: all
        of it is computed. None: ask again."""
        now_s = time.monotonic()
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = self._jobs[name] = PromptOfVllm(name, now_s)
            if not job.is_reading and not job.is_ready:
                job.is_reading = self._take_pages(job, len(token_ids), now_s)
                if job.is_reading:
                    tokens = list(token_ids)
                    self._readers.submit(self._prepare, job, tokens, salt, local_tokens)
            if not job.is_ready:
                return None
            return job.is_staged and not job.is_leaving and local_tokens >= job.needs_tokens

    def _take_pages(self, job: PromptOfVllm, tokens: int, now_s: float) -> bool:
        """False: there is no room now, or `is_ready`. Called with the lock."""
        blocks = tokens // self._settings.block_tokens
        is_possible = 0 < blocks <= self._pages.pages_max and now_s >= self._paused_until_s
        pages = self._pages.take(blocks) if is_possible else None
        if pages is not None:
            job.pages = pages
            return True
        self._settle_soon()
        if not is_possible or now_s - job.asked_s > self._settings.deadline_s:
            job.is_ready = True
            if blocks and now_s >= max(self._noted_s + NOTE_S, self._paused_until_s):
                self._noted_s = now_s
                log.warning(
                    "a prompt of %d blocks is computed without the store: pool_bytes has room for "
                    "%d blocks, of which %d are in use; raise it",
                    *(blocks, self._pages.pages_max, self._pages.used_pages),
                )
        return False

    def finished(self, name: LlmId) -> None:
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                return
            job.is_over = True
            job.is_ready = job.is_ready or not job.is_reading
            self._drop_if_over(job)
            may_leave = job.is_ready and not job.is_leaving
        if may_leave:  # otherwise `_prepare` notices it
            self._leave(job)

    def reset(self) -> None:
        """The weights may have changed: share nothing that was computed before, and from now on
        only with this server."""
        with self._lock:
            self._epoch = secrets.token_hex(8)
            for job in self._jobs.values():
                job.is_leaving = job.is_leaving or not job.is_ready  # it is read for old weights
                job.put_blocks = len(job.keys)

    # -- threads that read

    def _prepare(
        self, job: PromptOfVllm, token_ids: list[int], salt: str, local_tokens: int
    ) -> None:
        assert self._host is not None, "connect comes first"
        is_staged = False
        try:
            stage = self._read(job, token_ids, salt, local_tokens)
            if stage is not None:
                is_staged = True  # also after a failure it must be unstaged
                self._host.stage(stage, STAGE_S_MAX).result()
        except StoreError as error:
            self._pause(error)
        except Exception as error:  # Catch all: vLLM waits for this prompt
            log.exception("a prefix could not be read: %s", error)
        with self._lock:
            is_stale, job.is_leaving = job.is_leaving, False
            job.is_staged, job.is_ready = is_staged, True
            must_leave = job.is_over or not is_staged or is_stale
        if must_leave:
            self._leave(job)

    def _read(
        self, job: PromptOfVllm, token_ids: list[int], salt: str, local_tokens: int
    ) -> Stage | None:
        """None: it took too long."""
        block_tokens = self._settings.block_tokens
        seed = chain_seed(self._fingerprint, self._epoch, salt)
        job.keys = block_keys(token_ids, block_tokens, seed)
        first = min(local_tokens // block_tokens, len(job.keys))  # vLLM has the blocks before it
        found = self._found(job.keys)
        arrived = min(first, found)
        if found > first:
            left_s = job.asked_s + self._settings.deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            targets = [self._page(page) for page in job.pages[first:found]]
            here = self._client.get_into(job.keys[first:found], targets, deadline_s=left_s)
            arrived = first + len(list(takewhile(bool, here)))
            if self._pending(job.pages):  # a late transfer could overwrite saved blocks
                return None
        job.needs_tokens = min(first, arrived) * block_tokens
        job.found_blocks = job.put_blocks = arrived
        places = [place_of(POOL, page * self._block_bytes) for page in job.pages]
        return Stage(
            str(job.name),
            bytes(packed_tokens(token_ids)),
            salt,
            seed,
            job.keys,
            places,
            arrived * block_tokens,
            saved_tokens_max=len(job.keys) * block_tokens,
        )

    def _found(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that the store has."""
        return len(list(takewhile(bool, self._client.exist(keys))))

    def _pause(self, error: Exception) -> None:
        log.warning("prompts are computed without the store for %g s: %s", PAUSE_S, error)
        self._paused_until_s = max(self._paused_until_s, time.monotonic() + PAUSE_S)

    def _page(self, page: int) -> Bytes:
        return self._pool[page * self._block_bytes : (page + 1) * self._block_bytes]

    # -- the channel's thread (a Listener)

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        """vLLM has begun the prompt. If nothing is loaded or saved, its pages are not needed."""
        if not loaded_tokens:
            self.loaded(request_id)

    def loaded(self, request_id: str) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None or job.found_blocks < len(job.keys) or job.is_leaving:
                return
        self._leave(job)

    def saved(self, request_id: str, tokens: int) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None or self._is_closing:
                return
            whole = min(tokens // self._settings.block_tokens, len(job.keys))
            blocks = range(job.put_blocks, whole)
            if blocks:
                job.put_blocks = blocks.stop
                job.puts += 1
                self._writer.submit(self._put, job, blocks)
            may_leave = whole == len(job.keys) and not job.is_leaving
        if may_leave:
            self._leave(job)

    def broken(self, reason: str) -> None:
        log.error("KV is not shared any more: %s", reason)
        self._paused_until_s = float("inf")

    # -- the thread that puts

    def _put(self, job: PromptOfVllm, blocks: range) -> None:
        try:
            if time.monotonic() >= self._paused_until_s:
                keys = job.keys[blocks.start : blocks.stop]
                sources = [self._page(job.pages[block]) for block in blocks]
                self._client.put(keys, sources, deadline_s=self._settings.deadline_s)
        except StoreError as error:
            self._pause(error)
        except Exception:  # Catch all: the pages are given back in any case
            log.exception("%d blocks were not put into the store", len(blocks))
        finally:
            with self._lock:
                job.puts -= 1
                self._release(job)
            self._settle()

    # -- the end of a job

    def _leave(self, job: PromptOfVllm) -> None:
        """Free the pages when no copy and no put uses them."""
        with self._lock:
            if job.is_leaving:
                return
            job.is_leaving = True
        if job.is_staged:
            self._unstage(job)
        else:
            self._left(job)

    def _unstage(self, job: PromptOfVllm) -> None:
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
            job.is_staged = False
            self._release(job)
            self._settle_soon()

    def _lost(self, job: PromptOfVllm, error: BaseException) -> None:
        """The next user of these pages could get wrong KV, so they are never used again."""
        with self._lock:
            if not self._is_closing and self._paused_until_s != float("inf"):
                log.error("%d pages of the staging pool are lost: %s", len(job.pages), error)
            job.pages = []
            self._drop_if_over(job)

    def _release(self, job: PromptOfVllm) -> None:
        """Called with the lock."""
        if job.is_leaving and not job.is_staged and not job.puts:
            self._late += job.pages
            job.pages = []
            self._drop_if_over(job)

    def _drop_if_over(self, job: PromptOfVllm) -> None:
        """Called with the lock."""
        if job.is_over and not job.pages and job.is_ready:
            self._jobs.pop(job.name, None)

    def _settle_soon(self) -> None:
        """One call at a time, because a waiting prompt asks in every step. Called with the lock."""
        if self._late and self._settling.done() and not self._is_closing:
            self._settling = self._writer.submit(self._settle)

    def _settle(self) -> None:
        """Free the pages that no late read can write. It may wait for the transport."""
        with self._lock:
            late = list(self._late)
        try:
            pending = self._pending(late)
        except Exception:  # Catch all: they are tried again later
            log.exception("the reads that are under way are not known")
            return
        free = [page for page in late if page not in pending]
        with self._lock:
            free = [page for page in free if page in self._late]
            self._late = [page for page in self._late if page not in free]
            self._pages.release(free)

    def _pending(self, pages: Sequence[int]) -> set[int]:
        """Of these pages those that a read past its deadline may still write."""
        pending = set[int]()
        for memory, span in self._client.pending():
            start = memory.ctypes.data - self._pool.ctypes.data + span.offset_bytes
            stop = start + span.length_bytes
            pending.update(range(start // self._block_bytes, -(-stop // self._block_bytes)))
        return pending.intersection(pages)

    @property
    def used_pages(self) -> int:
        """Pages of prompts, and pages that a late read may still write."""
        self._settle()
        with self._lock:
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
