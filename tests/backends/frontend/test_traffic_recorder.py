"""Traffic comes back as a trace with the same sharing, without text, in whole lines, and nothing
that happens to the disk reaches a request."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from backends.config_pbtxt import FrontendConfig, read_config
from backends.errors import ConfigError
from backends.frontend import traffic_recorder
from backends.frontend.cluster_view import Served
from backends.frontend.frontend import Frontend
from backends.frontend.traffic_recorder import EndedRequest, TraceFiles, TrafficRecorder
from backends.tensors import string_tensor
from backends.workers.protocol import (
    REPLY_BODY,
    REPLY_IDS,
    REQUEST_BODY,
    DecodeReply,
    PrefillReply,
    PrefillRequest,
    encode,
)
from loadtest.replay.prompts import TokenSource
from loadtest.replay.trace import TraceRow, read_trace
from loadtest.simulator.cluster.job import offered_of
from tests.backends.asking import TOKENIZER, array
from tests.backends.frontend.test_live_request import Client, Cluster, reject

ROOT = Path(__file__).parents[3]
EXTRACTS = [
    ROOT / "tests" / "data" / f"{name}_turns.jsonl" for name in ("conversation", "synthetic")
]
MIB = 2**20


class LongCluster(Cluster):
    """Takes prompts of any length."""

    def served(self) -> Served:
        return Served("print", 64, 1_000_000, ("prefill_0", "decode_0"))

    def grpc_addresses(self) -> set[str]:
        return set()


class PromptWorkers:
    """Answer every request with as many tokens as it asks for."""

    def probe(self, address: str) -> None: ...

    def keep(self, addresses: set[str]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def __call__(
        self,
        address: str,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: list[str],
        request_id: str,
    ) -> Iterator[dict[str, np.ndarray]]:
        raw = msgspec.msgpack.decode(inputs[REQUEST_BODY][0])
        if model.startswith("prefill"):
            msgspec.convert(raw, PrefillRequest)
            body: msgspec.Struct = PrefillReply("p", 0, 0, 0, [], 0.0, 0.0, 0.0, 0.0)
            ids = [7]
        else:
            ids = [7] * (raw["sampling"]["max_tokens"] - 1)
            body = DecodeReply("d", 0, TOKENIZER.decode(ids), [], -1, "length")
        yield {REPLY_IDS: np.array(ids, np.int32), REPLY_BODY: string_tensor(encode(body))}


def frontend_with(recorder: TrafficRecorder | None, cluster: Cluster | None = None) -> Frontend:
    streams = SimpleNamespace(
        address="ipc://frontend",
        messages_per_s_max=500.0,
        listen=lambda *_: None,
        called=lambda _: None,
        forget=lambda _: None,
        seen_s=lambda _: None,
    )
    outbox = SimpleNamespace(send=lambda *_: None)
    parts = cast(Any, (cluster or LongCluster(), PromptWorkers(), streams, outbox))
    return Frontend(FrontendConfig(), TOKENIZER, *parts, recorder)


def ask(
    frontend: Frontend, ids: Sequence[int] | np.ndarray, tokens: int = 3, **inputs: Any
) -> Client:
    client = Client()
    asked = {"input_ids": list(ids), "max_tokens": tokens, "end_id": -1, "stream": True, **inputs}
    frontend.submit({name: array(name, value) for name, value in asked.items()}, {}, client)
    return client


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def ended(*ids: int, salt: str = "", output_tokens: int = 1) -> EndedRequest:
    return EndedRequest(time.monotonic(), np.array(ids, np.int32), output_tokens, salt)


def structure(rows: Sequence[TraceRow]) -> list[tuple[int, ...]]:
    """Ids by their first occurrence. The last, partial block of a prompt is another one when it is
    longer: of those, only what is as long is the same text."""
    seen: dict[tuple[int, int], int] = {}
    return [
        tuple(
            seen.setdefault((one, min(512, row.input_tokens - 512 * at)), len(seen))
            for at, one in enumerate(row.hash_ids)
        )
        for row in rows
    ]


@pytest.mark.parametrize("extract", EXTRACTS, ids=lambda path: path.stem)
def test_a_trace_that_is_served_is_recorded_with_the_same_lengths_and_sharing(
    extract: Path, tmp_path: Path
) -> None:
    rows = read_trace(extract)
    special = {TOKENIZER.vocabulary_tokens - 1}
    source = TokenSource(TOKENIZER.vocabulary_tokens, special, 5)
    recorder = TrafficRecorder(tmp_path, MIB)
    frontend = frontend_with(recorder)
    for row in rows:
        asked = source.prompt(row.hash_ids, 512, row.input_tokens)
        client = ask(frontend, asked, max(1, row.output_tokens))
        assert frontend.live.wait_until_empty(30.0)
        assert len(client.ids) == max(1, row.output_tokens), client.ends
    frontend.close(5.0)
    [path] = tmp_path.iterdir()
    recorded = read_trace(path)
    assert (recorder.written, recorder.dropped) == (len(rows), 0)
    assert [row.input_tokens for row in recorded] == [row.input_tokens for row in rows]
    lengths = [max(1, row.output_tokens) for row in rows]
    assert [row.output_tokens for row in recorded] == lengths
    assert structure(recorded) == structure(rows)
    assert len({one for row in rows for one in row.hash_ids}) < sum(len(r.hash_ids) for r in rows)
    times_ms = [row.timestamp_ms for row in recorded]
    assert times_ms == sorted(times_ms) and times_ms[-1] < 600_000
    shared = [
        [offered[0].keys.index(key) for key in one.keys if key in offered[0].keys]
        for offered in (offered_of(recorded),)
        for one in offered
    ]
    assert shared[0] == list(range(len(shared[0])))


def test_nothing_of_a_prompt_is_in_the_file_but_its_length(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path, MIB)
    recorder.note(ended(*range(100, 1_300), salt="tenant"))
    recorder.close()
    [line] = lines_in(tmp_path)
    assert list(line) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert (line["input_length"], len(line["hash_ids"])) == (1_200, 3)
    assert all(0 <= one < 2**63 for one in line["hash_ids"])
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and "tenant" not in path.read_text()


def test_ids_differ_between_recordings_and_between_tenants_and_not_within_one(
    tmp_path: Path,
) -> None:
    for folder in ("a", "b"):
        recorder = TrafficRecorder(tmp_path / folder, MIB)
        for salt in ("", "", "x"):
            recorder.note(ended(*range(600), salt=salt))
        recorder.close()
    first, second = ([set(line["hash_ids"]) for line in lines_in(tmp_path / f)] for f in "ab")
    assert first[0] == first[1] and not first[0] & first[2]
    assert not set().union(*first) & set().union(*second)


def test_a_rejected_request_is_recorded_without_an_answer_and_nonsense_is_not(
    tmp_path: Path,
) -> None:
    recorder = TrafficRecorder(tmp_path, MIB)
    frontend = frontend_with(recorder, LongCluster([reject("ttft_slo")]))
    ask(frontend, range(10, 20))
    assert frontend.live.wait_until_empty(10.0)
    ask(frontend, [], tokens=-1)
    assert frontend.live.wait_until_empty(10.0)
    frontend.close(5.0)
    assert [(line["input_length"], line["output_length"]) for line in lines_in(tmp_path)] == [
        (10, 0)
    ]


def test_without_a_folder_nothing_is_recorded(tmp_path: Path) -> None:
    assert FrontendConfig().recording_folder == ""
    frontend = frontend_with(None)
    assert len(ask(frontend, [5, 6]).ids) <= 3 and frontend.live.wait_until_empty(10.0)
    frontend.close(5.0)


def test_a_folder_that_cannot_be_written_is_an_error_at_load(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"recording_folder .*file/x cannot be written \(Not a"):
        TrafficRecorder(tmp_path / "file" / "x", MIB)
    with pytest.raises(ConfigError, match="recording_bytes_max is 5; use 1048576 or more"):
        read_config(FrontendConfig, "conductor", {"recording_bytes_max": "5"})


@pytest.mark.parametrize("taken", [None, 0, 11], ids=["fails", "nothing", "a part"])
def test_a_full_disk_costs_lines_and_no_request_and_no_half_line(
    taken: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`taken`: how much of a line the full disk takes; None: the write fails, with some of it."""
    write, is_full = os.write, threading.Event()

    def full(fd: int, data: bytes) -> int:
        if not is_full.is_set():
            return write(fd, data)
        if taken is None:
            write(fd, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:taken])

    monkeypatch.setattr(traffic_recorder.os, "write", full)
    files = TraceFiles(tmp_path, MIB)
    files.append(b'{"n": 1}\n')
    is_full.set()
    for _ in range(3):
        with pytest.raises(OSError, match=r"No space|the disk took"):
            files.append(b'{"number": 222222222}\n')
    assert lines_in(tmp_path) == [{"n": 1}]
    is_full.clear()
    files.append(b'{"n": 3}\n')
    files.close()
    assert lines_in(tmp_path) == [{"n": 1}, {"n": 3}]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, append = threading.Event(), TraceFiles.append

    def hang(files: TraceFiles, line: bytes) -> None:
        assert release.wait(30.0)
        append(files, line)

    monkeypatch.setattr(TraceFiles, "append", hang)
    recorder = TrafficRecorder(tmp_path, MIB)
    asked = 3 * traffic_recorder.WAITING_MAX
    for _ in range(asked):
        recorder.note(ended(1))
    assert recorder.dropped >= asked - traffic_recorder.WAITING_MAX - 1
    release.set()
    recorder.close()
    assert (
        recorder.written + recorder.dropped == asked == len(lines_in(tmp_path)) + recorder.dropped
    )


def test_a_folder_that_is_removed_is_made_no_trouble_of(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    recorder = TrafficRecorder(folder, MIB)
    [path] = folder.iterdir()
    path.unlink()
    folder.rmdir()
    for _ in range(3):
        recorder.note(ended(1))
    recorder.close()
    assert recorder.written + recorder.dropped == 3


def test_files_rotate_and_the_oldest_go_first(tmp_path: Path) -> None:
    files, bytes_max = TraceFiles(tmp_path, MIB), MIB
    for number in range(300):
        files.append(json.dumps({"n": number, "x": "." * 10_000}).encode() + b"\n")
    files.close()
    numbers = sorted(line["n"] for line in lines_in(tmp_path))
    assert numbers == list(range(numbers[0], 300)) and 40 < len(numbers) < 120
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bytes_max


def test_several_frontends_have_files_of_their_own_and_leave_those_of_others(
    tmp_path: Path,
) -> None:
    quiet = TraceFiles(tmp_path, MIB)
    quiet.append(b'{"quiet": 1}\n')
    busy = TraceFiles(tmp_path, MIB)
    for _ in range(300):
        busy.append(b'{"x": "' + b"." * 10_000 + b'"}\n')
    quiet.append(b'{"quiet": 2}\n')
    assert [line["quiet"] for line in lines_in(tmp_path) if "quiet" in line] == [1, 2]
    quiet.close()
    busy.close()
    assert len({path.name.rpartition("-")[0] for path in tmp_path.iterdir()}) == 2


KILLED = """
import sys
from pathlib import Path
from backends.frontend.traffic_recorder import TraceFiles
files, number = TraceFiles(Path(sys.argv[1]), 2**26), 0
while True:
    files.append(b'{"n": %d, "x": "%s"}\\n' % (number, b"." * 100_000))
    number += 1
    print(number, flush=True)
"""


def test_a_file_that_another_frontend_takes_for_a_dead_ones_while_it_begins_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, locked = fcntl.flock, list[int]()

    def flock_late(fd: int, how: int) -> None:
        locked.append(fd)
        if len(locked) == 1:
            TraceFiles(tmp_path, MIB).close()  # another frontend starts, and has nothing to say
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    files = TraceFiles(tmp_path, MIB)
    files.append(b"a line\n")
    files.close()
    [path] = tmp_path.iterdir()
    assert path.read_bytes() == b"a line\n"


def test_a_frontend_that_is_killed_leaves_whole_lines_for_the_next_one(
    tmp_path: Path, seed: int
) -> None:
    for attempt in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for _ in range(3 + (seed + attempt) % 20):
                child.stdout.readline()
            child.kill()
    [last, *_] = sorted(tmp_path.iterdir(), key=lambda path: -path.stat().st_mtime)
    with last.open("ab") as file:  # as if the kernel had stopped in the middle of a write
        file.write(b'{"n": 5, "x')
    TraceFiles(tmp_path, 2**26).close()
    lines = lines_in(tmp_path)
    assert len(lines) >= 12 and all(len(line["x"]) == 100_000 for line in lines)
    assert all(path.read_bytes().endswith(b"\n") for path in tmp_path.iterdir())
