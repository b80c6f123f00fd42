"""Requests one after the other while something else happens to the server."""

from __future__ import annotations

import itertools
import threading

from tests.e2e.server import Answer, Server, wait_until

B = 64
PROMPTS = 16  # of each thread


def prompt(number: int, tokens: int = 4 * B + 1) -> list[int]:
    return [20 + (number * 7919 + index * index * (number + 1)) % 2000 for index in range(tokens)]


def ask(server: Server, number: int, **parameters: str) -> Answer:
    return server.ask(
        input_ids=prompt(number),
        max_tokens=8,
        end_id=-1,
        return_decision=True,
        parameters=parameters,
    )


class Load:
    """Requests one after the other, in a few threads, until told to stop.

    Their prompts come again, so that their blocks need not be evicted, however long the load runs.
    """

    def __init__(self, server: Server, threads: int = 3) -> None:
        self.answers: list[Answer] = []
        self._server = server
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60.0)

    def _run(self, thread: int) -> None:
        for count in itertools.count():
            if self._is_over.is_set():
                return
            self.answers.append(self._ask(thread, count))

    def _ask(self, thread: int, count: int) -> Answer:
        return ask(self._server, 100 + thread + 10 * (count % PROMPTS))

    def wait_for_more(self, count: int) -> None:
        target = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= target, f"{count} more answers", 60.0)


def assert_all_answered(load: Load) -> None:
    errors = [answer.error for answer in load.answers if answer.error]
    assert not errors, errors
    assert all(len(answer.output_ids) == 8 for answer in load.answers)
