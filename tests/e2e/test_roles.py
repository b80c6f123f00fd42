"""Workers of a real server change their roles under load: every request is answered, with the
tokens of transformers; on a load that is steady nobody changes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backends.launch_secret import SECRET_VARIABLE
from backends.workers.protocol import TakeRole, WorkerOutbox, encode
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.records.membership import WorkerInfo
from tests.backends.engine.checkpoints import load_reference
from tests.backends.engine.reference import Comparison, greedy
from tests.backends.small_tokenizers import DEMO
from tests.e2e.load import prompt
from tests.e2e.server import Answer, Server, running, wait_until

TOKENS, PROMPTS, CLIENTS = 8, 6, 3
WORKERS = ("prefill_0", "prefill_1", "decode_0", "decode_1")
OTHER = {"prefill": "decode", "decode": "prefill"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """The controller is on: whatever changes here without an order is its doing."""
    folder = tmp_path_factory.mktemp("roles")
    yield from running(folder, state_dir, {"role_flips": "on", "roles": "both"})


class Orders:
    """Tells workers their role as a frontend does, with what the processes of the server know."""

    def __init__(self, server: Server) -> None:
        found = (process.environ() for process in psutil.Process(server.process.pid).children(True))
        known = next(each for each in found if "MOONCAKE_DIRECTORY" in each)
        self._directory = DirectoryClient(known["MOONCAKE_DIRECTORY"])
        self._outbox = WorkerOutbox(encode, known.get(SECRET_VARIABLE, ""))

    def worker(self, name: str) -> WorkerInfo | None:
        return next((w for w in self._directory.workers() if w.worker_id == name), None)

    def roles(self) -> dict[str, str]:
        return {worker.worker_id: worker.role for worker in self._directory.workers()}

    def flip(self, name: str) -> float:
        """Seconds until it was a worker of the other role."""
        before, began_s = self.worker(name), time.monotonic()
        assert before is not None and before.can_flip
        self._outbox.send(before.inbox, TakeRole(OTHER[before.role], before.incarnation))

        def has_changed() -> bool:
            now = self.worker(name)
            return now is not None and now.role == OTHER[before.role]

        wait_until(has_changed, f"{name} to change", 60.0)
        after = self.worker(name)
        assert after is not None and after.incarnation != before.incarnation
        return time.monotonic() - began_s

    def close(self) -> None:
        self._outbox.close()
        self._directory.close()


class Clients:
    """Ask the same prompts again and again; some answers stream, some prompts are new."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._server, self._is_over = server, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60.0)

    def _run(self, client: int) -> None:
        for count in itertools.count():
            if self._is_over.is_set():
                return
            which = (client + count) % PROMPTS
            tenant = f"t{client}-{count // 4}"  # so that prefixes have to be computed anew
            answer = self._server.ask(
                input_ids=prompt(which), max_tokens=TOKENS, end_id=-1,
                parameters={"tenant": tenant},
            )  # fmt: skip
            self.answers.append((which, answer))

    def wait_for_more(self, count: int) -> None:
        target = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= target, f"{count} more answers", 60.0)


def test_workers_flip_there_and_back_under_load_and_no_request_is_lost(server: Server) -> None:
    orders, seconds = Orders(server), []
    with Clients(server) as clients:
        clients.wait_for_more(5)
        for name in ("prefill_1", "prefill_1", "decode_1", "decode_1", "decode_0", "decode_0"):
            seconds.append(orders.flip(name))
            clients.wait_for_more(5)
    print(f"{len(clients.answers)} answers; flips took {[round(each, 1) for each in seconds]} s")
    model, comparison = load_reference(DEMO), Comparison()
    references = {which: greedy(model, prompt(which), TOKENS) for which in range(PROMPTS)}
    for number, (which, answer) in enumerate(clients.answers):
        assert not answer.error, answer.error
        comparison.add(f"answer {number}", answer.output_ids, references[which])
    comparison.check()
    assert "died" not in server.log.read_text(), "the launcher started somebody again"
    assert orders.roles() == {name: name.partition("_")[0] for name in WORKERS}
    assert server.metric("mooncake_requests_total", outcome="answered") == len(clients.answers)
    wait_until(server.is_idle, "pages, slots and leases to be free")
    orders.close()


def test_the_role_that_a_worker_has_now_is_shown(server: Server) -> None:
    orders = Orders(server)
    orders.flip("prefill_1")
    for role, live in (("prefill", 1), ("decode", 3)):
        wait_until(
            lambda r=role, n=live: server.metric("mooncake_workers_live", role=r) == n,
            f"{live} {role} workers to be shown",
        )
    wait_until(
        lambda: server.metric("mooncake_worker_info", model="prefill_1", role="decode") == 1,
        "the page to say what it is",
    )
    assert server.metric("mooncake_worker_info", model="prefill_1", role="prefill") == 0
    answer = server.ask(
        input_ids=prompt(1), max_tokens=TOKENS, end_id=-1,
        parameters={"decode_worker": "prefill_1"},
    )  # fmt: skip
    assert not answer.error and len(answer.output_ids) == TOKENS
    orders.flip("prefill_1")
    orders.close()


def test_on_a_steady_load_nobody_is_told_to_flip(server: Server) -> None:
    with Clients(server) as clients:
        began_s = time.monotonic()
        wait_until(lambda: time.monotonic() - began_s > 20.0, "20 s of load", 60.0)
    assert not [answer.error for _, answer in clients.answers if answer.error]
    assert server.metric("mooncake_role_flips_proposed_total") == 0
    assert server.metric("mooncake_workers_wanted", role="prefill") > 0, "it looks at the load"
    assert "died" not in server.log.read_text(), "the launcher started somebody again"
