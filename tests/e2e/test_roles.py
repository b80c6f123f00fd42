"""Workers of a real server change their roles under load: every request is answered, with the
tokens of transformers; on a load that is steady nobody changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.engine.checkpoints import load_reference
from tests.backends.engine.reference import Comparison, greedy
from tests.backends.small_tokenizers import DEMO
from tests.e2e.load import Load, assert_all_answered, prompt
from tests.e2e.role_orders import RoleOrders
from tests.e2e.server import Answer, Server, running, wait_until

pytestmark = pytest.mark.long

TOKENS, PROMPTS = 8, 6
WORKERS = ("prefill_0", "prefill_1", "decode_0", "decode_1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Server]:
    """The controller is on: whatever changes here without an order is its doing."""
    folder = tmp_path_factory.mktemp("roles")
    yield from running(folder, state_dir, {"role_flips": "on", "roles": "both"})


class RepeatedPrompts(Load):
    """The same prompts again and again, some of their prefixes for the first time."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.of_prompt: dict[int, list[Answer]] = {which: [] for which in range(PROMPTS)}

    def _ask(self, thread: int, count: int) -> Answer:
        which = (thread + count) % PROMPTS
        tenant = f"t{thread}-{count // 4}"  # so that prefixes have to be computed anew
        answer = self._server.ask(
            input_ids=prompt(which), max_tokens=TOKENS, end_id=-1, parameters={"tenant": tenant}
        )
        self.of_prompt[which].append(answer)
        return answer


def test_workers_flip_there_and_back_under_load_and_no_request_is_lost(server: Server) -> None:
    orders, load, seconds = RoleOrders(server), RepeatedPrompts(server), []
    with load:
        load.wait_for_more(5)
        for name in ("prefill_1", "prefill_1", "decode_1", "decode_1", "decode_0", "decode_0"):
            seconds.append(orders.flip(name))
            load.wait_for_more(5)
    print(f"{len(load.answers)} answers; flips took {[round(each, 1) for each in seconds]} s")
    model, comparison = load_reference(DEMO), Comparison()
    assert_all_answered(load)
    for which, answers in load.of_prompt.items():
        reference = greedy(model, prompt(which), TOKENS)
        for number, answer in enumerate(answers):
            comparison.add(f"answer {number} of prompt {which}", answer.output_ids, reference)
    comparison.check()
    assert "died" not in server.log.read_text(), "the launcher started somebody again"
    assert orders.roles() == {name: name.partition("_")[0] for name in WORKERS}
    assert server.metric("mooncake_requests_total", outcome="answered") == len(load.answers)
    wait_until(server.is_idle, "pages, slots and leases to be free")
    orders.close()


def test_the_role_that_a_worker_has_now_is_shown(server: Server) -> None:
    orders = RoleOrders(server)
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
        input_ids=prompt(1), max_tokens=TOKENS, end_id=-1, parameters={"decode_worker": "prefill_1"}
    )
    assert not answer.error and len(answer.output_ids) == TOKENS
    orders.flip("prefill_1")
    orders.close()


@pytest.mark.long
def test_on_a_steady_load_nobody_is_told_to_flip(server: Server) -> None:
    with RepeatedPrompts(server) as load:
        began_s = time.monotonic()
        wait_until(lambda: time.monotonic() - began_s > 20.0, "20 s of load", 60.0)
    assert_all_answered(load)
    assert server.metric("mooncake_role_flips_proposed_total") == 0
    assert server.metric("mooncake_workers_wanted", role="prefill") > 0, "it looks at the load"
    assert "died" not in server.log.read_text(), "the launcher started somebody again"
