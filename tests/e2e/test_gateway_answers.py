"""Effects of OpenAI's fields on the answers of a real `mooncake serve` with API keys."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import bench.clients
from backends.text.tokenizer import Tokenizer
from bench.clients.call_matrix import MESSAGES
from bench.clients.keyed_gateway import KEY, SINGLE_KEY
from tests.backends.engine.checkpoints import load_reference
from tests.backends.small_tokenizers import DEMO
from tests.e2e.gateways import Gateway
from tests.e2e.server import wait_until

FREED_S_MAX = 15.0  # a lease without a release ends after twice this time


def test_a_completion_keeps_to_what_its_fields_say(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    prompt = "It is a truth"
    greedy = [
        client.completions.create(model="demo", prompt=prompt, max_tokens=40, temperature=0)
        for _ in range(2)
    ]
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


def test_an_answer_has_the_form_and_the_biases_that_its_fields_say(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)

    def ask(temperature: float = 1.0, **more: Any) -> Any:
        fields = {"return_token_ids": True, **more}
        return client.completions.create(
            model="demo",
            prompt="It is a truth",
            max_tokens=24,
            temperature=temperature,
            seed=5,
            extra_body=fields,
        ).choices[0]

    choices = ["yes", "no (a.b)", "größer\nals"]
    assert ask(structured_outputs={"choice": choices}).text in choices
    assert ask(guided_choice=choices[1:2]).text == choices[1]
    assert re.fullmatch("[0-9]{3}-[a-f]{4}", ask(guided_regex="[0-9]{3}-[a-f]{4}").text)
    assert re.fullmatch(r"(a\+)*b", ask(guided_grammar='start: ("a" "+")~2 "b"').text)
    with pytest.raises(openai.BadRequestError, match="look-around") as refusal:
        ask(structured_outputs={"regex": "(?=a)"})
    assert refusal.value.param == "structured_outputs.regex"
    plain = ask(0.0)
    first = plain.token_ids[0]
    assert ask(0.0, logit_bias={str(first): -100}).token_ids[0] != first
    assert set(ask(logit_bias={str(first): 100}).token_ids) == {first}
    other: Any = openai.OpenAI(base_url=gateway.url, api_key=KEY)
    text = other.post("/detokenize", body={"tokens": plain.token_ids}, cast_to=object)
    assert text == {"prompt": plain.text}
    tokens = other.post("/tokenize", body={"prompt": "It is a truth"}, cast_to=object)["tokens"]
    assert plain.prompt_token_ids == tokens


def test_prompts_with_different_cache_salts_share_no_kv(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    prompt = "A salted prompt that is longer than two blocks of sixty-four tokens. " * 12

    def cached(salt: str) -> int:
        usage = client.completions.create(
            model="demo", prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt}
        ).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached("a") == 0
    wait_until(lambda: cached("a") >= 64, "the prompt to be found in the cache")
    assert cached("b") == 0


def test_logprobs_add_up_to_the_text(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    choice = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 6
    assert bytes(b for each in tokens for b in each.bytes or []).decode() == choice.message.content
    for each in tokens:
        best = each.top_logprobs
        assert len(best) == 3 and best[0].logprob >= best[1].logprob >= best[2].logprob
        assert (each.token, each.logprob) == (best[0].token, best[0].logprob), "greedy"


def test_four_answers_share_one_prefill_and_have_the_texts_of_four_requests(
    gateway: Gateway, seed: int
) -> None:
    client = gateway.client(max_retries=0)
    words = " ".join(str(number) for number in random.Random(seed).sample(range(10**6), 60))
    asked: dict[str, Any] = {"model": "demo", "prompt": words, "max_tokens": 24, "temperature": 1.0}

    def read() -> float:  # prompt tokens, from wherever their KV came
        return gateway.server.metric("mooncake_prompt_tokens_total")

    wait_until(gateway.server.is_idle, "an idle start")
    before = read()
    several = client.completions.create(**asked, n=4, seed=seed)
    usage = several.usage
    assert usage is not None
    wait_until(lambda: read() - before == usage.prompt_tokens, "one prefill in the metrics")
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and len(set(texts)) > 1
    alone = [client.completions.create(**asked, seed=seed + index) for index in range(4)]
    assert texts == [each.choices[0].text for each in alone]
    assert usage.completion_tokens == sum(
        each.usage.completion_tokens for each in alone if each.usage is not None
    )
    streamed = ["", "", "", ""]
    for event in client.completions.create(**asked, n=4, seed=seed, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    prompts = client.completions.create(**{**asked, "prompt": [words, "It was"]}, n=2, seed=seed)
    assert [choice.text for choice in prompts.choices[:2]] == texts[:2]
    wait_until(gateway.server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)


def test_a_client_that_leaves_four_answers_frees_all_of_them(gateway: Gateway) -> None:
    server = gateway.server
    wait_until(server.is_idle, "an idle start", FREED_S_MAX)
    stream = gateway.client(max_retries=0).completions.create(
        model="demo",
        prompt="It was",
        max_tokens=1_500,
        n=4,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    seen: set[int] = set()
    while len(seen) < 4:
        seen |= {choice.index for choice in next(stream).choices}
    before = server.metric("mooncake_requests_total", outcome="cancelled")
    stream.response.close()
    wait_until(server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)
    cancelled = lambda: server.metric("mooncake_requests_total", outcome="cancelled")  # noqa: E731
    wait_until(lambda: cancelled() == before + 4, "each answer to be cancelled")


def test_summed_logprobs_of_200_continuations_are_those_of_transformers(gateway: Gateway) -> None:
    """As harnesses for loglikelihood ask for them: by text and by token ids, twice."""
    client, tokenizer = gateway.client(max_retries=3), Tokenizer.load(DEMO)
    model = load_reference(DEMO)
    lines = (Path(bench.clients.__file__).parent / "loglikelihood.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines]
    assert len(items) == 200
    apart: list[float] = []
    for number, item in enumerate(items):
        text, cut = item["context"] + item["continuation"], len(tokenizer.encode(item["context"]))
        ids = tokenizer.encode(text)
        with torch.inference_mode():
            theirs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        rows = theirs[cut - 1 : len(ids) - 1]
        own = rows.gather(1, torch.tensor(ids[cut:])[:, None])[:, 0]
        prompt, max_tokens = (ids, 1) if number % 2 else (text, 0)
        answer = client.completions.create(
            model="demo", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        found, usage = answer.choices[0].logprobs, answer.usage
        assert found is not None and found.token_logprobs is not None and usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), max_tokens)
        assert answer.choices[0].text.startswith(text) and found.token_logprobs[0] is None
        ours = found.token_logprobs[cut : len(ids)]
        apart.append(abs(sum(ours) - own.sum().item()))
        best = [max((each or {}).values()) for each in (found.top_logprobs or [])[cut : len(ids)]]
        is_near = (rows.max(1).values - own) < 1e-3
        assert [a == b for a, b in zip(ours, best, strict=True)] == is_near.tolist(), "greedy"
    print(f"summed logprobs are apart by at most {max(apart):.2e}")
    assert max(apart) < 1e-3


def test_the_prompt_and_its_logprobs_come_with_both_routes(gateway: Gateway) -> None:
    client = gateway.client(max_retries=0)
    prompt = "A prompt that is longer than two blocks of sixty-four tokens. " * 12
    asked: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    chunks = list(client.completions.create(**asked, echo=True, logprobs=2, stream=True))
    assert "".join(each.choices[0].text for each in chunks) == prompt + plain
    first = chunks[0].choices[0].logprobs
    assert first is not None and first.token_logprobs is not None
    assert first.token_logprobs[0] is None and len(first.token_logprobs) > 100
    answer = client.completions.create(**asked, extra_body={"prompt_logprobs": 2})
    listed: list[Any] = answer.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert answer.choices[0].text == plain and listed[0] is None
    assert answer.usage is not None and answer.usage.prompt_tokens == len(listed)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0, "it computes what is cached"
    for each, log_prob in zip(listed[1:], first.token_logprobs[1:], strict=False):
        own = next(iter(each.values()))
        assert own["logprob"] == pytest.approx(log_prob, abs=1e-3)
        assert 2 <= len(each) <= 3 and {"rank", "decoded_token"} < own.keys()
    chat = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert chat.usage is not None and chat.model_extra is not None
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
