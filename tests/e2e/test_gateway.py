"""OpenAI's interface of a real `mooncake serve`: the package `openai` as it is, curl, and one who
leaves. API keys are configured, so every request here passes the whole way of a deployment."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from loadtest.clients import libraries, openai_calls
from loadtest.clients.call_matrix import Call, CalledServer
from loadtest.clients.keyed_gateway import KEY, SINGLE_KEY, keyed_gateway
from tests.e2e.public_clients import installed
from tests.e2e.server import Server, running, wait_until
from tests.fuzz_gateway.cases import fuzz

MESSAGES: list[Any] = [{"role": "user", "content": "It is a truth universally acknowledged"}]
FREED_S_MAX = 15.0  # a lease that nobody releases lasts twice as long
TOKENS = 7_000  # nothing ends by itself


class Gateway:
    def __init__(self, server: Server, called: CalledServer) -> None:
        self.server, self.called = server, called
        self.url = called.url.removesuffix("/v1")

    def client(self, key: str = KEY, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.called.url, api_key=key, **more)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    own = keyed_gateway(folder)
    for server in running(folder, state_dir, {}, [*own.arguments, "--openai-workers", "2"]):
        yield Gateway(server, own.called)


CALLS = (*openai_calls.CALLS, *openai_calls.CALLS_WITH_KEYS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_openai_package_is_served_as_it_is(gateway: Gateway, call: Call) -> None:
    """Version 3, in the environment of the tests."""
    assert openai.__version__.startswith("3.")
    assert call(gateway.called)


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_a_library_that_is_installed_is_served_as_it_is(
    gateway: Gateway, name: str, tmp_path: Path
) -> None:
    """Each in its own environment."""
    found = libraries.run(
        libraries.LIBRARIES[name], installed(name), gateway.called, tmp_path / "out"
    )
    assert not found.failed, "\n".join(f"{each.call}: {each.failure}" for each in found.failed)
    assert not any(each.left_out for each in found.outcomes)


def test_a_completion_keeps_to_what_its_fields_say(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    prompt = "It is a truth"
    greedy = [client.completions.create(model="demo", prompt=prompt, max_tokens=40, temperature=0)
              for _ in range(2)]  # fmt: skip
    text = greedy[0].choices[0].text
    assert text == greedy[1].choices[0].text
    word = text.split()[3]
    stopped = client.completions.create(
        model="demo", prompt=prompt, max_tokens=40, temperature=0, stop=[word]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text.partition(word)[0]
    exact = client.completions.create(
        model="demo", prompt=prompt, max_tokens=30, extra_body={"ignore_eos": True}
    )
    assert exact.usage is not None and exact.usage.completion_tokens == 30
    assert exact.choices[0].finish_reason == "length"


def test_the_second_turn_says_how_much_of_it_was_cached(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    prompt = "A prompt that is longer than two blocks of sixty-four tokens. " * 12
    asked: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 2}

    def cached() -> int:
        usage = client.completions.create(**asked).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached() == 0
    wait_until(lambda: cached() >= 64, "the prompt to be found in the cache")
    other = gateway.client(SINGLE_KEY).completions.create(**asked).usage
    assert other is not None and other.prompt_tokens_details is not None
    assert other.prompt_tokens_details.cached_tokens == 0, "another tenant's KV"


def test_logprobs_add_up_to_the_text(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    choice = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]  # fmt: skip
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 6
    assert bytes(b for each in tokens for b in each.bytes or []).decode() == choice.message.content
    for each in tokens:
        best = each.top_logprobs
        assert len(best) == 3 and best[0].logprob >= best[1].logprob >= best[2].logprob
        assert (each.token, each.logprob) == (best[0].token, best[0].logprob), "greedy"


def test_who_leaves_frees_pages_slot_and_leases(gateway: Gateway) -> None:
    server = gateway.server
    wait_until(server.is_idle, "an idle start")
    before = server.metric("mooncake_requests_total", outcome="cancelled")
    stream = gateway.client().completions.create(
        model="demo", prompt="It was", max_tokens=TOKENS, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    wait_until(lambda: server.metric("mooncake_pages_used"), "a worker to be at work")
    stream.close()
    wait_until(server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)
    cancelled = lambda: server.metric("mooncake_requests_total", outcome="cancelled")  # noqa: E731
    wait_until(lambda: cancelled() == before + 1, "the request to be cancelled")


def test_curl_reads_a_stream(gateway: Gateway) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": MESSAGES, "max_tokens": 3, "stream": True})
    answer = subprocess.run(
        ["curl", "-sN", "-H", f"Authorization: Bearer {KEY}", "-d", body,
         f"{gateway.url}/v1/chat/completions"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"


def test_whatever_is_sent_the_answer_is_an_answer_or_an_error_by_name(
    gateway: Gateway, seed: int
) -> None:
    """`make fuzz-gateway CASES=20000` has more of it."""
    found = fuzz(gateway.url, KEY, 150, seed)
    assert {status for _, status in found} >= {200, 400}
    wait_until(gateway.server.is_idle, "pages, slots and leases to be free")


def test_a_process_of_the_gateway_that_dies_is_started_again(gateway: Gateway) -> None:
    server = gateway.server
    launcher = psutil.Process(server.process.pid)
    gateway.client().models.list()
    counted = wait_until(
        lambda: server.metric("mooncake_gateway_requests_total"), "a request to be counted"
    )

    def found() -> list[psutil.Process]:
        alive = []
        for each in launcher.children():
            with contextlib.suppress(psutil.Error):  # it may end while it is looked at
                alive += [each] if "gateway-0" in each.cmdline() else []
        return alive

    [one] = found()
    one.send_signal(signal.SIGKILL)

    def is_back() -> bool:
        return any(each.pid != one.pid for each in found())

    wait_until(is_back, "another process")
    wait_until(
        lambda: server.metric("mooncake_gateway_requests_total") >= counted,
        "what was counted to stay",
    )
    answer = gateway.client(max_retries=5).completions.create(
        model="demo", prompt="Who", max_tokens=2
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
