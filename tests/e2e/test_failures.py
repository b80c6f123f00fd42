"""Processes that are killed: requests go on elsewhere, and whatever died is started again."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from tests.backends.engine.checkpoints import load_reference
from tests.backends.small_tokenizers import DEMO
from tests.e2e.server import Answer, Server, take, wait_until
from tests.e2e.server_processes import processes, stub_of, triton_of


@pytest.fixture(scope="module")
def server(restarted: Server) -> Server:
    return restarted


@pytest.fixture(autouse=True)
def serving(server: Server) -> None:
    """Each test begins with a server that answers, whatever the one before it has killed."""
    wait_until(lambda: answers_again(server), "the server to answer", 90.0)


def ask(server: Server, prompt: list[int], tokens: int) -> Answer:
    return server.ask(input_ids=prompt, max_tokens=tokens, end_id=-1, return_decision=True)


def test_a_stream_goes_on_elsewhere_when_its_decode_worker_is_killed(server: Server) -> None:
    prompt = [30 + 7 * n % 1900 for n in range(150)]
    alone = ask(server, prompt, 1_000)
    stream = server.stream(
        input_ids=prompt,
        max_tokens=1_000,
        end_id=-1,
        return_decision=True,
        stream=True,
        temperature=0.0,
    )
    answer = stream.begun(40)
    stub_of(server, answer.decision["decode"]).kill()
    rest = stream.all()
    assert not rest.error, rest.error
    assert answer.output_ids + rest.output_ids == alone.output_ids
    assert answer.text + rest.text == alone.text


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999},
    "minItems": 150,
    "maxItems": 150,
}


def logprobs_of(result: Any) -> tuple[list[float], list[list[int]], list[list[float]]]:
    own, ids, best = (
        result.as_numpy(name)[0].tolist()
        for name in ("output_log_probs", "top_token_ids", "top_log_probs")
    )
    return own, ids, best


def test_a_guided_answer_and_its_logprobs_go_on_when_its_decode_worker_is_killed(
    server: Server,
) -> None:
    """In the middle of its JSON: the same tokens, it validates, and each token has the logprobs
    that transformers says, once."""
    prompt = [30 + 7 * n % 1900 for n in range(100)]
    asked: dict[str, Any] = {
        "input_ids": prompt,
        "max_tokens": 1_500,
        "guided_json": json.dumps(NUMBERS),
        "return_decision": True,
    }
    alone = server.ask(**asked)
    attempts = server.metric("mooncake_retries_total")
    assert alone.finish_reason == "end_id" and not alone.error, alone.error
    stream = server.stream(stream=True, return_log_probs=True, top_logprobs=2, **asked)
    answer, own, ids, best = Answer(), list[float](), list[list[int]](), list[list[float]]()
    is_killed = False
    while not answer.finish_reason:
        result = stream.next()
        assert result is not None, "it ended without a reason"
        take(answer, result)
        for found, new in zip((own, ids, best), logprobs_of(result), strict=True):
            found += new
        if len(answer.output_ids) > 40 and not is_killed:
            is_killed = True
            stub_of(server, answer.decision["decode"]).kill()
    stream.leave()
    assert answer.output_ids == alone.output_ids
    wait_until(lambda: server.metric("mooncake_retries_total") > attempts, "the loss to be counted")
    jsonschema.validate(json.loads(answer.text), NUMBERS)
    with torch.inference_mode():
        tokens = torch.tensor([prompt + answer.output_ids])
        logits = load_reference(DEMO)(tokens).logits[0, len(prompt) - 1 : -1].float()
    theirs = torch.log_softmax(logits, -1).numpy()
    every = np.arange(len(answer.output_ids))
    np.testing.assert_allclose(own, theirs[every, answer.output_ids], atol=1e-3)
    np.testing.assert_allclose(best, np.take_along_axis(theirs, np.array(ids), 1), atol=1e-3)
    np.testing.assert_allclose(np.array(best)[:, 0], theirs.max(axis=1), atol=1e-3)


def test_a_schema_that_cannot_be_followed_is_refused_over_http_and_through_the_ensemble(
    server: Server,
) -> None:
    body = {"text_input": "a", "max_tokens": 4, "guided_json": '{"not": {"type": "null"}}'}
    for model in ("conductor", "ensemble"):
        status, answer = server.post(f"/v2/models/{model}/generate", body)
        assert status == 400 and b"guided_json: not at #" in answer, answer
    body |= {"max_tokens": 40, "guided_json": '{"enum": ["yes", "no"]}', "return_log_probs": True}
    for model in ("conductor", "ensemble"):
        status, answer = server.post(f"/v2/models/{model}/generate", body)
        said = json.loads(answer)
        assert status == 200 and json.loads(said["text_output"]) in ("yes", "no"), answer
        assert len(said["output_log_probs"]) == len(said["output_ids"]), answer


def test_requests_are_answered_when_a_prefill_worker_is_killed(server: Server) -> None:
    prompts = [[50 + (n * 31 + i * i) % 1900 for i in range(1500)] for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(ask, server, prompt, 8) for prompt in prompts]
        wait_until(lambda: server.metric("mooncake_queue_tokens"), "prefill to be at work")
        stub_of(server, "prefill_0").kill()
        answers = [future.result() for future in pending]
    assert not [answer.error for answer in answers if answer.error]
    assert [len(answer.output_ids) for answer in answers] == [8] * 8


@pytest.mark.parametrize(
    "end",
    [signal.SIGKILL, signal.SIGSTOP, pytest.param(signal.SIGABRT, marks=pytest.mark.long)],
    ids=str,
)
def test_a_worker_s_triton_takes_nobody_along(server: Server, end: signal.Signals) -> None:
    """Killed, frozen or aborted as a whole, with streams on it and beside it."""
    prompts = [[90 + n + 7 * i % 1900 for i in range(150)] for n in range(4)]
    alone = [ask(server, prompt, 200) for prompt in prompts]
    streams = [
        server.stream(
            input_ids=prompt,
            max_tokens=200,
            end_id=-1,
            stream=True,
            temperature=0.0,
            return_decision=True,
        )
        for prompt in prompts
    ]
    answers = [Answer() for _ in streams]
    for stream, answer in zip(streams, answers, strict=True):
        while "decode" not in answer.decision:
            take(answer, stream.next())
    worker = answers[0].decision["decode"]
    others = {"frontend", "prefill_0", "prefill_1", "decode_0", "decode_1"} - {worker}
    before = {name: triton_of(server, name).pid for name in others}
    victim = triton_of(server, worker)
    family = [victim, *victim.children(recursive=True)]
    for process in family:
        process.send_signal(end)
    try:
        for stream, answer, expected in zip(streams, answers, alone, strict=True):
            rest = stream.all()
            assert not rest.error, rest.error
            assert answer.output_ids + rest.output_ids == expected.output_ids
    finally:
        if end == signal.SIGSTOP:
            for process in family:
                process.kill()
    assert before == {name: triton_of(server, name).pid for name in before}
    wait_until(lambda: is_back(server, worker), f"{worker} to serve again", 60.0)


def is_back(server: Server, worker: str) -> bool:
    role = worker.split("_")[0]
    answer = server.ask(
        input_ids=[40, 41, 42],
        max_tokens=2,
        end_id=-1,
        return_decision=True,
        parameters={f"{role}_worker": worker},
    )
    return not answer.error and answer.decision[role] == worker


def test_killed_workers_are_started_again_by_the_launcher(server: Server) -> None:
    for worker in ("prefill_0", "decode_0", "decode_1"):
        wait_until(lambda w=worker: is_back(server, w), f"{worker} to serve again", 60.0)
    wait_until(server.is_idle, "pages, slots and leases to be free")


@pytest.mark.parametrize("name", ["mooncake_store.directory", "--node-id s1", "/frontend "])
def test_whatever_is_killed_is_started_again_and_serves(server: Server, name: str) -> None:
    prompt = [60 + 11 * n % 1800 for n in range(200)]
    expected = ask(server, prompt, 8)
    assert not expected.error, expected.error
    [victim] = [
        process
        for process, arguments in processes(server).items()
        if name in " ".join(arguments[:8])
    ]
    victim.kill()
    wait_until(
        lambda: "died, starting it again" in server.log.read_text(errors="replace"),
        "the launcher's word",
    )

    def is_served_by_both() -> bool:
        try:
            answers = [
                server.ask(
                    input_ids=prompt,
                    max_tokens=8,
                    end_id=-1,
                    return_decision=True,
                    parameters={
                        "prefill_worker": f"prefill_{n}",
                        "decode_worker": f"decode_{1 - n}",
                    },
                )
                for n in (0, 1)
            ]
        except (OSError, triton.InferenceServerException):  # Triton itself is not back yet
            return False
        return all(answer.output_ids == expected.output_ids for answer in answers)

    wait_until(is_served_by_both, f"all workers to serve after {name} was killed", 90.0)


def test_a_killed_directory_costs_no_cached_prefix(server: Server) -> None:
    prompt = [70 + (13 * n + n * n) % 1700 for n in range(1_000)]
    first = ask(server, prompt, 4)
    assert not first.error, first.error
    before = restarts(server)
    [(victim, words)] = [
        (process, arguments)
        for process, arguments in processes(server).items()
        if "mooncake_store.directory" in arguments
    ]
    address = words[words.index("--address") + 1]
    victim.kill()
    wait_until(lambda: restarts(server) > before, "the launcher's word")

    def has_adopted() -> bool:
        try:
            with DirectoryClient(address) as client:
                nodes = client.stats().nodes
        except StoreError:
            return False
        is_told = len(nodes) == 2 and all(node.is_open for node in nodes)
        return is_told and sum(node.adopted for node in nodes) >= 15

    wait_until(has_adopted, "both nodes to say what they hold")
    workers = {"prefill_worker": first.decision["prefill"]}

    def is_cached() -> bool:  # false as well while workers register again
        answer = server.ask(
            input_ids=prompt, max_tokens=4, end_id=-1, return_decision=True, parameters=workers
        )
        cached.append(answer.decision.get("cached_tokens", 0))
        return not answer.error and answer.output_ids == first.output_ids

    cached: list[int] = []
    wait_until(is_cached, "an answer")
    assert cached[-1] >= 960 - 64, f"computed again: {cached}"


def test_clients_hear_at_once_when_the_conductor_s_own_process_is_killed(server: Server) -> None:
    stream = server.stream(text_input="It was", max_tokens=4000, end_id=-1, stream=True)
    assert stream.next() is not None
    stub_of(server, "conductor").kill()
    with pytest.raises(triton.InferenceServerException):
        while stream.next(timeout_s=20.0) is not None:
            pass
    wait_until(lambda: answers_again(server), "the conductor to serve again", 60.0)


def answers_again(server: Server) -> bool:
    try:
        return len(ask(server, [40, 41, 42], 3).output_ids) == 3
    except (OSError, triton.InferenceServerException):
        return False


def restarts(server: Server) -> int:
    return server.log.read_text(errors="replace").count("died, starting it again")
