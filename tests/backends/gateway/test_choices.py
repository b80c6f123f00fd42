"""Several answers and several prompts of one request, as OpenAI's clients read them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from backends.gateway.request.fields import CHAT, COMPLETION
from backends.gateway.request.infer_request import infer_request, read_request
from backends.gateway.request.prompts import CHOICES_MAX
from backends.statuses import HttpRefusal
from backends.tensors import ANSWERS_MAX
from tests.backends.gateway.rig import Rig, run, until

TOKENS = 3
WORDS = " word" * TOKENS
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USAGE = {"prompt_tokens": 5, "completion_tokens": TOKENS, "cached_tokens": 2}


def counts(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return {**{name: usage[name] for name in list(USAGE)[:2]}, "cached_tokens": cached}


def numbered(index: int) -> str:
    return "".join(f" word{index or ''}" for _ in range(TOKENS))


def test_a_whole_answer_has_each_choice_and_counts_its_prompt_once() -> None:
    async def check(rig: Rig) -> None:
        for route in (CHAT, COMPLETION):
            answer = (await rig.post(route, n=3, max_tokens=TOKENS)).json
            assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
            texts = [
                each["message"]["content"] if route == CHAT else each["text"]
                for each in answer["choices"]
            ]
            assert texts == [WORDS, f"{WORDS}1", f"{WORDS}2"]
            assert counts(answer["usage"]) == {**USAGE, "completion_tokens": 3 * TOKENS}

    run(check)


@pytest.mark.parametrize("options", [{}, {"continuous_usage_stats": True}])
def test_a_stream_has_the_events_of_each_choice_and_one_end(options: dict[str, bool]) -> None:
    async def check(rig: Rig) -> None:
        for route in (CHAT, COMPLETION):
            asked = {"n": 3, "max_tokens": TOKENS, "stream": True}
            answer = await rig.post(
                route, **asked, stream_options={"include_usage": True, **options}
            )
            *events, usage, done = answer.events
            assert done == "[DONE]" and usage["choices"] == []
            assert counts(usage["usage"]) == {**USAGE, "completion_tokens": 3 * TOKENS}
            of_choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
            for event in events:
                [choice] = event["choices"]
                of_choices[choice["index"]].append(choice)
            assert sorted(of_choices) == [0, 1, 2]
            for index, choices in of_choices.items():
                if route == CHAT:
                    assert choices.pop(0)["delta"] == {"role": "assistant", "content": ""}
                texts = [
                    each["delta"]["content"] if route == CHAT else each["text"] for each in choices
                ]
                assert "".join(texts) == numbered(index)
                reasons = [each["finish_reason"] for each in choices]
                assert reasons == [None] * (TOKENS - 1) + ["length"]
            if options:
                counted = [each["usage"]["completion_tokens"] for each in events if each["usage"]]
                assert counted == sorted(counted) and counted[-1] == 3 * TOKENS

    run(check)


def test_each_choice_of_a_chat_with_tools_has_calls_of_its_own() -> None:
    async def check(rig: Rig) -> None:
        said = [{"role": "user", "content": 'say:[{"name": "f", "parameters": {}}]'}]
        answer = await rig.post(CHAT, messages=said, tools=[FUNCTION], tool_choice="required", n=1)
        [call] = answer.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        answer = await rig.post(
            CHAT, messages=said, tools=[FUNCTION], tool_choice="required", n=2, stream=True
        )
        called = {
            event["choices"][0]["index"]
            for event in answer.events[:-1]
            if "tool_calls" in event["choices"][0]["delta"]
        }
        assert 0 in called, "the second text is no list, so it may have none"

    run(check)


def test_prompts_are_answered_in_their_order_and_each_is_counted() -> None:
    async def check(rig: Rig) -> None:
        prompts = ["say:one", "say:two!!", "say:three"]
        answer = (await rig.post(COMPLETION, prompt=prompts, n=2)).json
        assert [each["index"] for each in answer["choices"]] == list(range(6))
        texts = [each["text"] for each in answer["choices"][::2]]
        assert texts == ["one", "two!!", "three"]
        assert counts(answer["usage"])["prompt_tokens"] == 3 * 5
        assert len(rig.frontend.requests) == 3
        ids = [each.id for each in rig.frontend.requests]
        assert len(set(ids)) == 3 and answer["id"] in ids

    run(check)


def test_a_stream_of_several_prompts_numbers_its_choices_like_the_whole_answer() -> None:
    async def check(rig: Rig) -> None:
        prompts = [f"say:words of {number}" for number in range(4)]
        *events, done = (await rig.post(COMPLETION, prompt=prompts, stream=True)).events
        texts: dict[int, str] = defaultdict(str)
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {number: f"words of {number}" for number in range(4)}
        assert done == "[DONE]"

    run(check)


def test_an_error_of_one_prompt_ends_the_request() -> None:
    async def check(rig: Rig) -> None:
        error = "rejected kind=ttft_slo retry_after_s=2.20: full"
        answer = await rig.post(COMPLETION, prompt=["silent", f"fail:{error}", "silent"])
        assert answer.status == 429
        await until(lambda: rig.frontend.cancelled == 2)

    run(check)


def test_best_of_returns_the_answers_of_the_highest_mean_logprob_without_logprobs() -> None:
    async def check(rig: Rig) -> None:
        answer = (await rig.post(COMPLETION, n=2, best_of=4, max_tokens=TOKENS)).json
        assert [each["text"] for each in answer["choices"]] == [f"{WORDS}3", f"{WORDS}2"]
        assert [each["index"] for each in answer["choices"]] == [0, 1]
        assert [each["logprobs"] for each in answer["choices"]] == [None, None]
        assert answer["usage"]["completion_tokens"] == 4 * TOKENS, "all were generated"
        shown = (await rig.post(COMPLETION, best_of=2, logprobs=1, max_tokens=TOKENS)).json
        assert shown["choices"][0]["logprobs"]["token_logprobs"] == [-0.25] * TOKENS

    run(check)


def test_a_client_that_leaves_ends_the_calls_for_all_prompts() -> None:
    async def check(rig: Rig) -> None:
        await rig.post(COMPLETION, prompt=["silent"] * 3, timeout=0.001)
        await until(lambda: rig.frontend.cancelled == 3)

    run(check)


def seeds(**fields: Any) -> list[int]:
    request = read_request(COMPLETION, {"prompt": ["a", "b", "c"], **fields}, 100)
    found = []
    for prompt in range(3):
        message = infer_request(request, "x", prompt)
        [at] = [i for i, each in enumerate(message.inputs) if each.name == "seed"]
        found.append(int.from_bytes(message.raw_input_contents[at], "little"))
    return found


def test_prompts_share_the_seed_that_is_sent_and_no_other() -> None:
    assert seeds(seed=7, n=4) == [7, 7, 7]
    assert seeds(n=4) == [100, 104, 108]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": ANSWERS_MAX + 1}, "n"),
        ({"n": True}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 2, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"n": 2, "echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 2, "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["a"] * (CHOICES_MAX + 1)}, "prompt"),
        ({"prompt": ["a"] * (CHOICES_MAX // 2 + 1), "n": 2}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", [1]]}, None),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_field(
    fields: dict[str, Any], param: str | None
) -> None:
    body = {"prompt": "hello", **fields}
    if param is None:  # texts and tokens may be mixed
        assert read_request(COMPLETION, body, 1).choices == 2
        return
    with pytest.raises(HttpRefusal) as caught:
        read_request(COMPLETION, body, 1)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_error_of_one_of_several_prompts_has_its_number() -> None:
    async def check(rig: Rig) -> None:
        error = "invalid_request: text_input is too long"
        answer = await rig.post(COMPLETION, prompt=["say:a", f"fail:{error}"])
        assert answer.status == 400 and answer.error["param"] == "prompt[1]"
        assert answer.error["message"].startswith("prompt[1] is too long")

    run(check)


def test_token_ids_are_returned_only_if_they_are_wanted() -> None:
    async def check(rig: Rig) -> None:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 1}
        [choice] = (await rig.post(COMPLETION, **asked)).json["choices"]
        assert not {"token_ids", "prompt_token_ids"} & choice.keys()

    run(check)
