"""Bad requests get an error that names the limit, and harm nobody. Afterwards nothing is lost."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.server import Server, Stream, tensor, wait_until
from tests.e2e.server_processes import stubs_of

CONTEXT = 8192  # of the demo checkpoint
PROMPT = {"text_input": "It is a truth"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"text_input": ""}, "empty"),
    "no prompt": ({"max_tokens": 3}, "text_input"),
    "prompt longer than the context": ({"input_ids": [20] * (CONTEXT + 1)}, "8192"),
    "prompt that leaves no room": ({"input_ids": [20] * CONTEXT}, "8192"),
    "max_tokens 0": ({**PROMPT, "max_tokens": 0}, "max_tokens is 0; use 1 to"),
    "max_tokens negative": ({**PROMPT, "max_tokens": -5}, "max_tokens is -5; use 1 to"),
    "max_tokens huge": (
        {**PROMPT, "max_tokens": 2**31 - 1},
        "maximum context length is 8192 tokens",
    ),
    "invalid UTF-8": ({"text_input": b"\xff\xfe abc"}, "UTF-8"),
    "temperature NaN": ({**PROMPT, "temperature": float("nan")}, "temperature is nan; use 0"),
    "temperature negative": ({**PROMPT, "temperature": -1.0}, "temperature is -1.0"),
    "top_p 0": ({**PROMPT, "top_p": 0.0}, "top_p is 0.0; use a number above 0, up to 1"),
    "top_p 2": ({**PROMPT, "top_p": 2.0}, "top_p is 2.0"),
    "10,000 stop words": (
        {**PROMPT, "stop_words": [f"w{n}" for n in range(10_000)]},
        "10000 words; use at most",
    ),
    "token outside the vocabulary": ({"input_ids": [5, 99_999]}, "2047"),
    "beam search": ({**PROMPT, "beam_width": 4}, "beam_width is not supported"),
}


def error_of(server: Server, inputs: dict[str, Any], model: str = "conductor") -> str:
    return server.stream(model, stream=True, **inputs).all().error


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_what_is_wrong_over_grpc(demo: Server, name: str) -> None:
    inputs, expected = BAD[name]
    error = error_of(demo, inputs)
    assert "invalid_request:" in error and expected in error, error


def test_every_mistake_of_a_request_is_named_at_once(demo: Server) -> None:
    error = error_of(demo, {**PROMPT, "max_tokens": 0, "top_p": 2.0, "temperature": -1.0})
    assert all(name in error for name in ("max_tokens is 0", "top_p is 2.0", "temperature is -1"))


@pytest.mark.parametrize("model", ["conductor", "ensemble"])
def test_a_bad_request_is_told_what_is_wrong_over_http(demo: Server, model: str) -> None:
    for body, expected in (
        ({**PROMPT, "max_tokens": 0}, "max_tokens is 0"),
        ({"text_input": "", "max_tokens": 1}, "empty"),
        ({**PROMPT, "max_tokenz": 5}, "max_tokens"),
    ):
        status, answer = demo.post(f"/v2/models/{model}/generate", body)
        assert status == 400 and expected in json.loads(answer)["error"], answer


def test_triton_itself_refuses_unknown_tensors_and_wrong_types(demo: Server) -> None:
    for extra, expected in (
        (tensor("no_such_tensor", 1, "INT32"), "unexpected inference input 'no_such_tensor'"),
        (tensor("max_tokens", 1.0, "FP32"), "max_tokens"),
    ):
        error = Stream(demo.addresses.grpc, "conductor", [tensor("text_input", "a"), extra]).all()
        assert expected in error.error, error.error


def test_bytes_that_are_no_json_get_an_error(demo: Server) -> None:
    status, answer = demo.post("/v2/models/conductor/generate", b"\x00{{{")
    assert status in (400, 500) and b"JSON" in answer, "Triton's own words; its status varies"


def test_good_neighbours_of_bad_requests_get_the_same_answer_as_alone(demo: Server) -> None:
    alone = demo.ask(**PROMPT, max_tokens=12)
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(error_of, demo, inputs) for inputs, _ in BAD.values()]
        good = [pool.submit(lambda: demo.ask(**PROMPT, max_tokens=12)) for _ in range(8)]
        assert all(future.result() for future in bad)
        assert {future.result().text for future in good} == {alone.text}


def threads_and_files(server: Server) -> dict[str, tuple[int, int]]:
    return {name: (p.num_threads(), p.num_fds()) for name, p in stubs_of(server).items()}


def mixed_requests(server: Server, seed: int, count: int) -> list[str]:
    """Good, bad and abandoned requests in random order; their errors ("" for none)."""
    chance = random.Random(seed)

    def one(number: int) -> str:
        kind = chance.choice(("good", "good", "bad", "leave"))
        if kind == "bad":
            return error_of(server, chance.choice(list(BAD.values()))[0])
        tokens = [chance.randrange(16, 2000) for _ in range(chance.randrange(1, 300))]
        if kind == "good":
            return server.ask(input_ids=tokens, max_tokens=chance.randrange(1, 20)).error
        stream = server.stream(input_ids=tokens, max_tokens=2000, end_id=-1, stream=True)
        stream.next()
        stream.leave()
        return ""

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(one, range(count)))


def test_after_200_good_and_bad_requests_nothing_is_lost(demo: Server, seed: int) -> None:
    mixed_requests(demo, seed, 60)  # pools of threads and connections fill up once
    wait_until(demo.is_idle, "an idle start")
    before = threads_and_files(demo)
    errors = mixed_requests(demo, seed + 1, 200)
    unexpected = [error for error in errors if error and "invalid_request:" not in error]
    assert not unexpected, unexpected
    wait_until(demo.is_idle, "pages, slots and leases to be free")
    after = threads_and_files(demo)
    for name, (threads, files) in after.items():
        # Pools of the front and of decode's senders grow up to the requests at once, 12 here.
        allowed = 12 if name == "conductor" or name.startswith("decode") else 0
        assert threads <= before[name][0] + allowed, (name, before[name], after[name])
        assert files <= before[name][1] + 2, (name, before[name], after[name])
