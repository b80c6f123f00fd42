"""Recording of the traffic as a trace: lengths, times and shared prefixes, without any text.

The format is that of the published traces, which `mooncake replay`, `simulate` and `plan` read:

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}

`timestamp` is the arrival, counted from the start of the recorder. `output_length` counts tokens
sent to the client. A hash id names a block of 512 tokens together with all tokens before the block;
the last block may be shorter. Ids are hashes, keyed by 32 random bytes that each recorder makes and
never writes. So a guessed text cannot be checked against a recording, and two recordings share no
ids. Requests with different cache salts share no ids, because they share no KV.

A thread writes the requests from a bounded queue. While the disk is slow, full or gone, requests
are dropped and counted. Each line is one write. So a frontend that is killed leaves at most one
partial line, which the next recorder in the folder cuts off. Writers lock their files, so several
frontends can share a folder. When the files of a folder exceed `bytes_max`, the oldest files
without a writer are deleted. On a file system without locks, no file is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.errors import ConfigError
from mooncake_store.block_keys import KEY_BYTES, block_keys, packed_tokens

log = logging.getLogger(__name__)
TRACE_BLOCK_TOKENS = 512  # in the published format, independent of the workers' blocks
FILES = 8  # a file is full at 1 / FILES of `bytes_max` (parameter recording_bytes_max)
WAITING_MAX = 256  # requests in the queue; a request with 100,000 prompt tokens takes 400 kB
OPEN_ATTEMPTS = 5  # limit of attempts to open a new file
CLOSE_S_MAX = 2.0
WARN_EVERY_S = 60.0
NAMES = "trace-*.jsonl"


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, with the facts that are recorded."""

    arrived_s: float  # monotonic time of the arrival
    prompt_ids: np.ndarray
    output_tokens: int  # tokens sent to the client
    cache_salt: str  # requests with different salts share no KV


class SaltedBlocks:
    """Makes hash ids with a random key, which only this object has."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)

    def ids(self, prompt_ids: np.ndarray, cache_salt: str) -> list[int]:
        seed = hashlib.blake2b(cache_salt.encode(), digest_size=KEY_BYTES, key=self._salt).digest()
        keys = block_keys(prompt_ids, TRACE_BLOCK_TOKENS, seed)
        if len(prompt_ids) > len(keys) * TRACE_BLOCK_TOKENS:
            rest = packed_tokens(prompt_ids[len(keys) * TRACE_BLOCK_TOKENS :])
            before = keys[-1] if keys else seed
            keys.append(hashlib.blake2b(rest, digest_size=KEY_BYTES, key=before).digest())
        return [int.from_bytes(key[:8], "little") >> 1 for key in keys]  # 63 bits fit an int64


class TraceFiles:
    """The files of one recorder in a folder. Not thread-safe.

    Every method may raise OSError and can be called again afterwards. `append` after `close` opens
    a new file.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max
        self._file_bytes_max = max(1, bytes_max // FILES)
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._name = f"trace-{began}-{secrets.token_hex(4)}"
        self._number = 0
        self._size = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._cut_dead_ends()
        self._fd: int | None = self._opened()

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError. After an error, part of the line stays if `_cut` failed."""
        if self._fd is None or (self._size and self._size + len(line) > self._file_bytes_max):
            self.close()
            self._prune(len(line))
            self._fd = self._opened()
        try:
            written = os.write(self._fd, line)
        except OSError:
            self._cut()
            raise
        if written < len(line):
            self._cut()
            raise OSError(f"the disk took {written} of {len(line)} bytes")
        self._size += written

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
            if not self._size:
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._name}-{self._number:04}.jsonl"

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for _ in range(OPEN_ATTEMPTS):
            self._number += 1
            self._size = 0
            fd = os.open(self._path, flags, 0o600)  # request times are private
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_ours = False
            except OSError:  # a file system without locks
                return fd
            else:
                is_ours = os.fstat(fd).st_nlink > 0
            if is_ours:
                return fd
            # Another recorder locked or deleted the new file before this recorder locked it.
            self._path.unlink(missing_ok=True)
            os.close(fd)
        raise OSError(f"other recorders locked or deleted each new file in {self._folder}")

    def _cut(self) -> None:
        """Cut off the partial line of a failed write."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:  # keep the partial line at the file's end, and continue in a new file
            os.close(self._fd)
            self._fd = None
            raise

    def _prune(self, coming_bytes: int) -> None:
        """Delete the oldest files without a writer until there is room for one more file."""
        found = []
        for path in self._folder.glob(NAMES):
            with contextlib.suppress(FileNotFoundError):  # another recorder deleted it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in found) + max(coming_bytes, self._file_bytes_max)
        for _, size, path in sorted(found):
            if total <= self._bytes_max:
                return
            with _unwritten(path) as fd:
                if fd is not None:
                    path.unlink(missing_ok=True)
                    total -= size

    def _cut_dead_ends(self) -> None:
        """Cut off partial lines of frontends that were killed during a write."""
        for path in self._folder.glob(NAMES):
            with contextlib.suppress(OSError), _unwritten(path) as fd:
                if fd is None:
                    continue
                text = path.read_bytes()
                whole = text.rfind(b"\n") + 1
                if not whole:
                    path.unlink(missing_ok=True)
                elif whole < len(text):
                    os.ftruncate(fd, whole)


@contextlib.contextmanager
def _unwritten(path: Path) -> Iterator[int | None]:
    """Lock a file that no recorder writes. Yields its descriptor, or None if that fails."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield None
    else:
        yield fd
    finally:
        os.close(fd)


class TrafficRecorder:
    """Writes in a thread of its own. `written` and `dropped` count requests. Thread-safe."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Raises ConfigError if the folder cannot be written."""
        try:
            self._files = TraceFiles(folder, bytes_max)
        except OSError as error:
            raise ConfigError(
                f"recording_folder {folder} cannot be written ({error.strerror or error}): set "
                'another folder, or set recording_folder to "" to record nothing'
            ) from None
        self.written = self.dropped = 0
        self._began_s = time.monotonic()
        self._warned_s = -WARN_EVERY_S
        self._blocks = SaltedBlocks()
        self._waiting: queue.Queue[EndedRequest | None] = queue.Queue(WAITING_MAX)
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="traffic-recorder", daemon=True)
        self._thread.start()
        log.info("traffic is recorded in %s", folder)

    def note(self, request: EndedRequest) -> None:
        """Queue the request, or count it as dropped. Never waits for the disk, never raises."""
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self._drop("the disk is too slow")

    def close(self) -> None:
        """Write the waiting requests. Waits at most 2 * CLOSE_S_MAX."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S_MAX)
        self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                self._files.append(self._line(request))
            except Exception as error:  # Catch all: no client depends on the recording
                self._drop(str(error))
            else:
                with self._counting:
                    self.written += 1
        with contextlib.suppress(OSError):
            self._files.close()

    def _line(self, request: EndedRequest) -> bytes:
        fields = {
            "timestamp": max(0, round((request.arrived_s - self._began_s) * 1e3)),
            "input_length": len(request.prompt_ids),
            "output_length": request.output_tokens,
            "hash_ids": self._blocks.ids(request.prompt_ids, request.cache_salt),
        }
        return json.dumps(fields).encode() + b"\n"

    def _drop(self, why: str) -> None:
        now_s = time.monotonic()
        with self._counting:
            self.dropped += 1
            if is_new := now_s - self._warned_s >= WARN_EVERY_S:
                self._warned_s = now_s
        if is_new:
            log.warning("a request was not recorded, %d so far: %s", self.dropped, why)
