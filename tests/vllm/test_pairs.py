"""Two prefill and two decode workers on vLLM. Every pair and every place of a prefix gives the
tokens of plain vLLM, also beside other requests and when an engine dies."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.role_orders import RoleOrders
from tests.e2e.server import Answer, Server, take, wait_until
from tests.vllm.engine_processes import alive, engine_core, engine_processes, segments
from tests.vllm.serving import (
    BORDERS,
    PlainAnswer,
    PlainRequest,
    plain_answers,
    prompts_of,
    random_checkpoint,
    serving,
)

TOKENS = 40
PREFILL, DECODE = ("prefill_0", "prefill_1"), ("decode_0", "decode_1")  # on nodes s0 and s1
PAIRS = list(itertools.product(PREFILL, DECODE))
AT_ONCE = 16
RESTART_S_MAX = 120.0
PATTERN = "[a-f]{10,20}-[0-9]{3}"
PENALTIES = {"repetition_penalty": 1.25, "presence_penalty": 2.0, "frequency_penalty": 1.5}
# Inputs of our server, and what plain vLLM gets instead.
SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PENALTIES | {"end_id": -1}, PENALTIES),
    (
        PENALTIES | {"end_id": -1, "return_log_probs": True, "top_logprobs": 3},
        PENALTIES | {"logprobs": 3},
    ),
    (
        {"guided_decoding_guide": PATTERN, "guided_decoding_guide_type": "regex"},
        {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False},
    ),
]


@dataclass
class Pairs:
    server: Server
    sets: list[list[list[int]]]  # a set of prompts for each pair, and two more
    expected: list[list[list[int]]]
    sampled: list[PlainAnswer]  # to the first prompt of the last set, for each of SAMPLED

    def ask(self, prompt: list[int], prefill: str = "", decode: str = "") -> Answer:
        pinned = {"prefill_worker": prefill, "decode_worker": decode}
        return self.server.ask(
            input_ids=prompt,
            max_tokens=TOKENS,
            end_id=-1,
            parameters={name: value for name, value in pinned.items() if value},
        )

    def check_sampled(self, number: int, prefill: str = "", decode: str = "") -> None:
        """Ask with the inputs of SAMPLED."""
        pinned = {"prefill_worker": prefill, "decode_worker": decode}
        stream = self.server.stream(
            input_ids=self.sets[-1][0],
            max_tokens=TOKENS,
            stream=True,
            parameters={name: value for name, value in pinned.items() if value},
            **SAMPLED[number][0],
        )
        answer, log_probs = Answer(), list[float]()
        while (result := stream.next()) is not None:
            take(answer, result)
            if (found := result.as_numpy("output_log_probs")) is not None:
                log_probs += found.reshape(-1).tolist()
        stream.leave()
        expected = self.sampled[number]
        assert (answer.error, answer.output_ids) == ("", expected.token_ids), SAMPLED[number]
        assert log_probs == pytest.approx(expected.log_probs, abs=1e-3)

    def check(self, number: int, prefill: str = "", decode: str = "") -> list[int]:
        """Ask the prompts of a set; the cached tokens of each."""
        cached = []
        for prompt, expected in zip(self.sets[number], self.expected[number], strict=True):
            answer = self.ask(prompt, prefill, decode)
            assert (answer.error, answer.output_ids) == ("", expected), (len(prompt), prefill)
            cached.append(answer.cached_tokens)
        return cached


def at_least_whole_blocks(cached: list[int]) -> list[int]:
    """The cached tokens of each prompt, or those of its whole blocks where they are more."""
    return [
        max(found, (tokens - 1) // 64 * 64) for found, tokens in zip(cached, BORDERS, strict=True)
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    folder = tmp_path_factory.mktemp("pairs")
    checkpoint = random_checkpoint("llama", folder / "checkpoint")
    sets = [prompts_of(BORDERS, seed=20 + number) for number in range(len(PAIRS) + 2)]
    plain = [PlainRequest(prompt) for prompt in itertools.chain(*sets)]
    plain += [PlainRequest(sets[-1][0], sampling) for _, sampling in SAMPLED]
    answers = plain_answers(checkpoint, plain, TOKENS)
    flat = [answer.token_ids for answer in answers[: -len(SAMPLED)]]
    expected = [flat[i : i + len(BORDERS)] for i in range(0, len(flat), len(BORDERS))]
    roles = {"roles": "both"}
    for server in serving(folder, folder / "state", checkpoint, workers=2, parameters=roles):
        yield Pairs(server, sets, expected, answers[-len(SAMPLED) :])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_prompts_cold_cached_here_and_cached_on_the_other_node_get_the_tokens_of_plain_vllm(
    pairs: Pairs, pair: tuple[str, str]
) -> None:
    number, (prefill, decode) = PAIRS.index(pair), pair
    assert pairs.check(number, prefill, decode) == [0] * len(BORDERS)
    here = pairs.check(number, prefill, decode)
    assert at_least_whole_blocks(here) == here
    other = PREFILL[1 - PREFILL.index(prefill)]
    there = pairs.check(number, other, decode)
    assert at_least_whole_blocks(there) == there
    wait_until(pairs.server.is_idle, "the last pages and leases to go")


def test_a_worker_that_takes_the_other_role_gives_the_same_tokens(pairs: Pairs) -> None:
    number, orders = len(PAIRS), RoleOrders(pairs.server)
    orders.flip("prefill_1")
    pairs.check(number, "prefill_0", "prefill_1")
    orders.flip("decode_1")
    pairs.check(number, "decode_1", "prefill_1")
    wait_until(pairs.server.is_idle, "the last pages and leases to go")
    for name in ("prefill_1", "decode_1"):
        orders.flip(name)
    pairs.check(number, "prefill_1", "decode_1")
    orders.close()


def test_the_metrics_of_vllm_move(pairs: Pairs) -> None:
    pairs.check(0, *PAIRS[0])
    for name in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"):
        wait_until(lambda name=name: pairs.server.metric(name), f"{name} to move")
    assert pairs.server.metric("mooncake_handover_tokens_total", path="loaded")


@pytest.mark.parametrize("number", range(len(SAMPLED)), ids=["penalties", "logprobs", "grammar"])
def test_penalties_logprobs_and_grammars_are_those_of_plain_vllm(pairs: Pairs, number: int) -> None:
    for pair in PAIRS:
        pairs.check_sampled(number, *pair)
    wait_until(pairs.server.is_idle, "the last pages and leases to go")


def test_requests_at_once_get_the_tokens_of_plain_vllm(pairs: Pairs) -> None:
    asked = [(i % len(PAIRS), i % len(BORDERS), PAIRS[i * 3 % 4]) for i in range(AT_ONCE * 2)]

    def ask(number: int, index: int, pair: tuple[str, str]) -> None:
        answer = pairs.ask(pairs.sets[number][index], *pair)
        assert (answer.error, answer.output_ids) == ("", pairs.expected[number][index])

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for done in [threads.submit(ask, *each) for each in asked]:
            done.result()
    wait_until(pairs.server.is_idle, "the last pages and leases to go")


@pytest.mark.parametrize(
    ("model", "depth"),
    [
        ("decode_0", 0),
        pytest.param("decode_0", 1, marks=pytest.mark.torture),
        pytest.param("prefill_0", 0, marks=pytest.mark.torture),
        ("prefill_0", 1),
    ],
)
def test_a_killed_engine_costs_no_answer_and_its_worker_comes_back(
    pairs: Pairs, model: str, depth: int
) -> None:
    before = engine_processes(pairs.server, model)
    memory = segments(before)
    victim = before[0] if not depth else engine_core(before[0])
    with ThreadPoolExecutor(4) as threads:
        sampled = [threads.submit(pairs.check_sampled, number) for number in range(len(SAMPLED))]
        asked = [threads.submit(pairs.ask, prompt) for prompt in pairs.sets[-1]]
        os.kill(victim.pid, signal.SIGKILL)
        answers = [each.result() for each in asked]
        for each in sampled:
            each.result()
    for answer, expected in zip(answers, pairs.expected[-1], strict=True):
        assert (answer.error, answer.output_ids) == ("", expected)
    wait_until(lambda: not alive(before), f"the end of {alive(before)}")
    wait_until(lambda: not any(path.exists() for path in memory), f"the end of {memory}")
    wait_until(lambda: pairs.server.ready(model), "the worker to come back", RESTART_S_MAX)
    assert pairs.check(0)
    wait_until(pairs.server.is_idle, "the last pages and leases to go")
