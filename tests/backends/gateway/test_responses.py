"""/v1/responses: what a request becomes, and what OpenAI's own package sees of the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import openai
import pytest

from backends.gateway.responses.request import read_responses
from backends.gateway.responses.stored import EarlierResponses, StoredResponses
from backends.statuses import HttpRefusal
from backends.tenants import ApiKeys
from tests.backends.gateway.rig import Rig, run

PATH = "/v1/responses"
NOTHING_STORED = EarlierResponses(StoredResponses(), "")
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
    {"type": "reasoning_text", "text": "I add."}
]}  # fmt: skip
SAID = "<think>Let me see.</think>\n\nHello you."


def messages(**fields: Any) -> list[dict[str, Any]]:
    wanted = read_responses({"input": "hi", **fields}, 1, NOTHING_STORED)
    found: list[dict[str, Any]] = msgspec.json.decode(wanted.chat.prompts[0]["messages"])
    return found


def refusal(**fields: Any) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as found:
        read_responses({"input": "hi", **fields}, 1, NOTHING_STORED)
    return found.value


def keys(**stores: bool) -> ApiKeys:
    tenants = {name: {"stored_responses_bytes_max": each * 10**6} for name, each in stores.items()}
    sums = {name: hashlib.sha256(f"key-of-{name}".encode()).hexdigest() for name in stores}
    listed = [{"sha256": each, "tenant": name} for name, each in sums.items()]
    return ApiKeys(None, json.dumps({"tenants": tenants, "keys": listed}))


def test_a_text_is_the_message_of_a_user_behind_the_instructions() -> None:
    assert messages(instructions="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]


def test_items_become_messages_with_their_calls_and_reasoning() -> None:
    items = [
        {"role": "developer", "content": "Short answers."},
        {"role": "user", "content": [{"type": "input_text", "text": "1 and 1?"}]},
        THOUGHT,
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I call.", "annotations": []}],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "2"},
        {"role": "assistant", "content": "and 3"},
    ]
    found = messages(input=items, instructions="Be kind.", tools=[FUNCTION])
    assert found[0] == {"role": "system", "content": "Be kind.\n\nShort answers."}
    assert found[1] == {"role": "user", "content": "1 and 1?"}
    assert (found[2]["reasoning_content"], found[2]["content"]) == ("I add.", "I call.")
    assert [call["id"] for call in found[2]["tool_calls"]] == ["c1", "c2"]
    assert found[3:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "2"},
        {"role": "assistant", "content": "and 3"},
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "send a text or a list of items"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call'"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "'king'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "'input_image'",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "without space"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search'"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "text.format.schema",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "'much'"),
        ({"include": ["all"]}, "include", "'all'"),
        ({"top_logprobs": 2}, "top_logprobs", "requires include"),
        ({"metadata": {"a": 1}}, "metadata.a", "send a string"),
        ({"max_output_token": 3}, "max_output_token", "did you mean max_output_tokens?"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no stored response"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "no stored item"),
        ({"input": [{"id": "rs_a_" + "1" * 5000}]}, "input", "no stored item"),
        ({"input": [{"id": "msg_a_²"}]}, "input", "no stored item"),
        ({"input": [{"role": "user", "content": "x" * 5_000_000}]}, "input", "of text"),
        ({"tool_choice": ""}, "tool_choice", "tool_choice is ''"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    found = refusal(**fields)
    assert found.param == param
    assert words in found.message


def test_effort_and_format_are_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "input": "hi",
        "max_output_tokens": 7,
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    }
    chat = read_responses(body, 1, NOTHING_STORED).chat
    assert chat.inputs["max_tokens"] == 7
    assert json.loads(chat.inputs["guided_json"])["properties"] == schema["properties"]
    assert chat.names["guided_json"] == "text.format"
    assert json.loads(chat.prompts[0]["chat_template_kwargs"]) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }


def with_client(
    test: Callable[[Rig, openai.AsyncOpenAI], Awaitable[None]], found: ApiKeys | None = None
) -> None:
    async def within(rig: Rig) -> None:
        rig.frontend.reasoning_parser = "qwen3"
        await rig.gateway.calls.probe()
        url = f"http://{rig.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key-of-acme", max_retries=0) as client:
            await test(rig, client)

    run(within, found)


def test_openais_package_sees_reasoning_and_text_whole_and_streamed() -> None:
    async def test(_: Rig, client: openai.AsyncOpenAI) -> None:
        whole = await client.responses.create(model="demo", input=f"say:{SAID}")
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert (whole.output_text, whole.status) == ("Hello you.", "completed")
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        assert whole.usage.input_tokens_details.cached_tokens == 2
        assert whole.to_dict()["store"] is False
        async with client.responses.stream(model="demo", input=f"say:{SAID}") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert final.output_text == "Hello you."
        assert final.usage == whole.usage

    with_client(test)


def test_openais_package_sees_a_call_whole_and_streamed() -> None:
    async def test(_: Rig, client: openai.AsyncOpenAI) -> None:
        given: dict[str, Any] = {
            "model": "demo",
            "input": 'say:[{"name": "add", "parameters": {"a": 1}}]',
            "tools": [FUNCTION],
            "tool_choice": "required",
        }
        whole = await client.responses.create(**given)
        assert [item.type for item in whole.output] == ["function_call"]
        async with client.responses.stream(**given) as stream:
            async for _event in stream:
                pass
            final = await stream.get_final_response()
        assert final.output[0].type == "function_call"
        assert json.loads(final.output[0].arguments) == {"a": 1}

    with_client(test)


def test_an_error_has_its_own_status_but_within_an_answer_it_fails_the_response() -> None:
    async def test(rig: Rig, _: openai.AsyncOpenAI) -> None:
        refused = await rig.send(
            "POST", PATH, {"input": "fail:rejected kind=ttft_slo retry_after_s=2.20: full"}
        )
        assert refused.status == 429
        broken = await rig.send(
            "POST",
            PATH,
            {"input": "break:the worker failed", "stream": True, "max_output_tokens": 8},
        )
        assert broken.status == 200
        assert b"event: response.failed\n" in broken.body

    with_client(test)


def test_a_stored_response_is_read_continued_and_deleted() -> None:
    async def test(rig: Rig, client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="demo", input="say:one", store=True)
        again = await client.responses.retrieve(first.id)
        assert (again.output_text, again.to_dict()["store"]) == ("one", True)
        second = await client.responses.create(
            model="demo", input="say:two", previous_response_id=first.id, store=True
        )
        [prompt] = [json.loads(each.raw_input_contents[
            [put.name for put in each.inputs].index("messages")][4:])
            for each in rig.frontend.requests[-1:]]  # fmt: skip
        assert [each["content"] for each in prompt] == ["say:one", "one", "say:two"]
        pages = client.responses.input_items.list(second.id, order="asc", limit=2)
        listed = [item.to_dict()["content"] async for item in pages]
        assert [each[0]["text"] for each in listed] == ["say:one", "one", "say:two"]
        rig.key = client.api_key
        for each in (first.output[0].id, f"in_{first.id.removeprefix('resp_')}_0"):
            reference = {"type": "item_reference", "id": each}
            said = [reference, {"role": "user", "content": "say:three"}]
            assert (await rig.send("POST", PATH, {"input": said})).status == 200
        wrong = [{"type": "item_reference", "id": first.output[0].id.replace("msg", "rs")}]
        assert (await rig.send("POST", PATH, {"input": wrong})).status == 404
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)

    with_client(test, keys(acme=True))


@pytest.mark.parametrize("way", ["get", "items", "delete", "continue", "reference"])
def test_a_response_of_another_tenant_does_not_exist(way: str) -> None:
    async def test(rig: Rig, client: openai.AsyncOpenAI) -> None:
        made = await client.responses.create(model="demo", input="say:secret", store=True)
        rig.key = "key-of-other"
        if way in ("get", "items", "delete"):
            path = f"{PATH}/{made.id}" + ("/input_items" if way == "items" else "")
            found = await rig.send("DELETE" if way == "delete" else "GET", path)
        elif way == "continue":
            found = await rig.send("POST", PATH, {"input": "x", "previous_response_id": made.id})
        else:
            items = [{"type": "item_reference", "id": made.output[0].id}]
            found = await rig.send("POST", PATH, {"input": items})
        assert found.status == 404
        assert found.error["code"] in ("response_not_found", "previous_response_not_found")
        assert b"secret" not in found.body
        assert (await client.responses.retrieve(made.id)).output_text == "secret"

    with_client(test, keys(acme=True, other=True))


def test_a_tenant_that_may_not_store_is_refused_and_default_is_not_to_store() -> None:
    async def test(rig: Rig, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.PermissionDeniedError, match="are stored"):
            await client.responses.create(model="demo", input="say:x", store=True)
        made = await client.responses.create(model="demo", input="say:x")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)

    with_client(test, keys(acme=False))
