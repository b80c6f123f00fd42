"""OpenAI's interface of a real `mooncake serve`: the package `openai` as it is, curl, and one who
leaves. API keys are configured, so every request here passes the whole way of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from backends.launcher.environment import free_ports
from backends.tenants.api_keys import sha256_of
from tests.e2e.server import Server, running, wait_until
from tests.fuzz_gateway.cases import fuzz

KEY, OTHER_KEY = "mk-of-acme", "mk-of-other"
MESSAGES: list[Any] = [{"role": "user", "content": "It is a truth universally acknowledged"}]
FREED_S_MAX = 15.0  # a lease that nobody releases lasts twice as long
TOKENS = 7_000  # nothing ends by itself


class Gateway:
    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = KEY, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **more)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    keys = folder / "tenants.json"
    keys.write_text(json.dumps({
        "tenants": {"acme": {}, "other": {"requests_in_flight_max": 1}},
        "keys": [{"sha256": sha256_of(KEY), "tenant": "acme"},
                 {"sha256": sha256_of(OTHER_KEY), "tenant": "other"}],
    }))  # fmt: skip
    keys.chmod(0o600)
    [port] = free_ports(1, (), 20_000, 32_000)
    arguments = ["--openai-port", str(port), "--openai-workers", "2", "--api-keys", str(keys)]
    for server in running(folder, state_dir, {}, arguments):
        yield Gateway(server, port)


def test_the_openai_package_gets_the_same_answer_in_every_way(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 24, "seed": 5}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None and whole.usage.completion_tokens <= 24

    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert said == text
    usage = chunks[-1].usage
    assert usage is not None and chunks[-1].choices == []
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens

    async def asynchronously() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY) as same:
            answer = await same.chat.completions.create(**asked)
            stream = await same.chat.completions.create(**asked, stream=True)
            parts = [each.choices[0].delta.content or "" async for each in stream]
            return answer.choices[0].message.content or "", "".join(parts)

    assert asyncio.run(asynchronously()) == (text, text)


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
    other = gateway.client(OTHER_KEY).completions.create(**asked).usage
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


def test_an_answer_follows_its_schema(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    schema = {
        "type": "object", "additionalProperties": False, "required": ["is_so"],
        "properties": {"is_so": {"type": "boolean"}},
    }  # fmt: skip
    choice = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=60, seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "so", "schema": schema}},
    ).choices[0]  # fmt: skip
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content or "")["is_so"], bool)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo", messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        )  # fmt: skip
    assert caught.value.param == "response_format"


def test_errors_are_the_packages_own_classes(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 4}
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = [
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"top_p": 7}, openai.BadRequestError, "top_p"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"extra_body": {"max_tokns": 5}}, openai.BadRequestError, "max_tokns"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"extra_body": {"tenant": "other"}}, openai.PermissionDeniedError, "tenant"),
    ]
    for said, kind, param in cases:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**(asked | said))
        assert caught.value.param == param, said
    with pytest.raises(openai.AuthenticationError):
        gateway.client("mk-of-nobody").models.list()
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="demo", input="hi")
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="demo", input="hi")
    with pytest.raises(openai.InternalServerError) as late:
        client.chat.completions.create(
            **(asked | {"max_tokens": TOKENS}), extra_body={"timeout": 0.2, "ignore_eos": True}
        )
    assert late.value.status_code == 504


def test_the_package_comes_back_by_itself_when_it_is_rejected(gateway: Gateway) -> None:
    """Tenant `other` may have one request in flight: a second one is rejected, and served when the
    first has ended."""
    first = gateway.client(OTHER_KEY).completions.create(
        model="demo", prompt="It was", max_tokens=TOKENS, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(first))
    impatient = gateway.client(OTHER_KEY, max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "prompt": "Who", "max_tokens": 2}
    with pytest.raises(openai.RateLimitError) as caught:
        impatient.completions.create(**asked)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    rejected = gateway.server.metric("mooncake_rejections_total")
    found: list[str] = []
    patient = gateway.client(OTHER_KEY, max_retries=8)
    waiting = threading.Thread(
        target=lambda: found.append(patient.completions.create(**asked).choices[0].text)
    )
    waiting.start()
    wait_until(
        lambda: gateway.server.metric("mooncake_rejections_total") > rejected,
        "a rejection of the patient one",
    )
    first.close()
    waiting.join(60.0)
    assert found and found[0]


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
