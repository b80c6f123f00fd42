"""Clients that check every token while a server is being damaged, and the damage itself.

What happens next hangs on how many answers there were, and which bytes are hit follows from a seed.
Not here: what is damaged when, and what must hold (test_damage.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import tritonclient.grpc as triton

from tests.backends.engine.reference import Reference
from tests.e2e.server import Answer, Server, wait_until

NEXT_ANSWER_S_MAX = 90.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and the only right answer to it."""

    prompt: list[int]
    reference: Reference


class Clients:
    """Each asks one prompt after the other, until the block ends."""

    def __init__(
        self,
        server: Server,
        asked: Sequence[Asked],
        count: int,
        seed: int,
        on_answer: Callable[[], None],
    ) -> None:
        self.wrong: list[str] = []
        self.hung: list[str] = []
        self.errors: list[str] = []
        self.answered = 0
        self._server = server
        self._asked = asked
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),))
            for number in range(count)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(NEXT_ANSWER_S_MAX)
        self.hung += [thread.name for thread in self._threads if thread.is_alive()]

    @property
    def ended(self) -> int:
        return self.answered + len(self.errors) + len(self.wrong) + len(self.hung)

    def wait_for_more(self, count: int) -> None:
        target = self.ended + count
        wait_until(lambda: self.ended >= target, f"{count} more answers", NEXT_ANSWER_S_MAX)

    def _run(self, chance: random.Random) -> None:
        while not self._is_over.is_set():
            asked = chance.choice(self._asked)
            tokens = len(asked.reference.token_ids)
            try:
                answer = self._server.ask(input_ids=asked.prompt, max_tokens=tokens, end_id=-1)
            except queue.Empty:
                self.hung.append(f"no message for a minute after a prompt of {len(asked.prompt)}")
                continue
            except (OSError, triton.InferenceServerException) as error:
                answer = Answer(error=str(error))
            with self._lock:
                self._judge(asked, answer)

    def _judge(self, asked: Asked, answer: Answer) -> None:
        if answer.error:
            self.errors.append(answer.error)
        elif answer.output_ids != asked.reference.token_ids:
            self.wrong.append(f"{answer.output_ids} is not {asked.reference.token_ids}")
        else:
            self.answered += 1
        self._on_answer()


class BitFlips:
    """Flips single bits of the storage nodes' memory, wherever the dice say."""

    def __init__(self, server: Server, seed: int) -> None:
        self._names = re.compile(rf"mooncake-{server.process.pid}-.*\bs\d+")
        self._chance = random.Random(seed)
        self.flipped = 0

    def flip(self, count: int) -> None:
        files = sorted(
            path for path in Path("/dev/shm").iterdir() if self._names.fullmatch(path.name)
        )
        for path in self._chance.choices(files, k=count) if files else []:
            with contextlib.suppress(FileNotFoundError):  # its node was killed meanwhile
                self._flip_one(path)

    def _flip_one(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            if size_bytes := os.fstat(descriptor).st_size:
                place = self._chance.randrange(size_bytes)
                [byte] = os.pread(descriptor, 1, place)
                os.pwrite(descriptor, bytes([byte ^ 1 << self._chance.randrange(8)]), place)
                self.flipped += 1
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def all_serve(server: Server) -> bool:
    """Each of the four workers answers requests again."""
    for prefill, decode in (("prefill_0", "decode_1"), ("prefill_1", "decode_0")):
        workers = {"prefill_worker": prefill, "decode_worker": decode}
        try:
            answer = server.ask(
                input_ids=[40, 41, 42],
                max_tokens=2,
                end_id=-1,
                return_decision=True,
                parameters=workers,
            )
        except (OSError, triton.InferenceServerException, queue.Empty):  # it waits for its worker
            return False
        if answer.error or [answer.decision[role] for role in ("prefill", "decode")] != [
            prefill,
            decode,
        ]:
            return False
    return True
