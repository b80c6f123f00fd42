"""/v1/messages: what a request in Anthropic's form becomes, and its answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backends.gateway.messages.request import read_messages_request
from backends.statuses import HttpRefusal
from backends.tenants import ApiKeys
from tests.backends.gateway.rig import KEYS, HttpAnswer, Rig, run

PATH = "/v1/messages"
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
SAID = "<think>Let me see.</think>\n\nHello you."


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 64, "messages": [{"role": "user", "content": text}], **fields}


def chat(**fields: Any) -> list[dict[str, Any]]:
    found = read_messages_request(body(**fields), 1)
    said: list[dict[str, Any]] = msgspec.json.decode(found.prompts[0]["messages"])
    return said


def test_blocks_become_messages_with_their_calls_and_results() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "1 and 1?", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I add.", "signature": "s"},
                {"type": "text", "text": "I call."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    assert chat(messages=turns, system=[{"type": "text", "text": "Be kind."}], tools=[TOOL]) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 and 1?"},
        {
            "role": "assistant",
            "reasoning_content": "I add.",
            "content": "I call.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "requires it"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role", "'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "'image'",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "'bash_20250124'"),
        ({"tools": [{**TOOL, "input_schema": 5}]}, "tools[0].input_schema", "input_schema"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type", "'all'"),
        ({"thinking": {"type": "much"}}, "thinking.type", "'much'"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].type",
            "'tool_use'",
        ),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "'huge'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format", "json_schema"),
        ({"stop_sequence": []}, "stop_sequence", "did you mean stop_sequences?"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(HttpRefusal) as found:
        read_messages_request(body(**fields), 1)
    assert found.value.param == param
    assert words in found.value.message


def test_choice_and_thinking_are_those_of_a_chat() -> None:
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    found = read_messages_request(body(tools=[TOOL], tool_choice=choice, stop_sequences=["END"]), 1)
    assert found.tools is not None
    assert (found.tools.named, found.tools.is_parallel) == ("add", False)
    assert json.loads(found.prompts[0]["chat_template_kwargs"]) == {"enable_thinking": False}
    assert found.inputs["stop_words"] == ["END"]


def test_a_last_message_of_the_assistant_is_continued_and_its_format_is_that_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    found = read_messages_request(
        body(messages=turns, output_config=config, thinking={"type": "enabled"}), 1
    )
    assert json.loads(found.inputs["guided_json"])["properties"] == schema["properties"]
    assert found.names["guided_json"] == "output_config.format"
    assert json.loads(found.prompts[0]["chat_template_kwargs"]) == {
        "enable_thinking": True,
        "continue_final_message": True,
        "reasoning_effort": "low",
    }


def events_of(answer: HttpAnswer) -> list[dict[str, Any]]:
    parts = [part.split("\ndata: ") for part in answer.body.decode().split("\n\n")[:-1]]
    found = [json.loads(data) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in found]
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "text of it": ""})
            case "content_block_delta":
                delta = event["delta"]
                [text] = [delta[key] for key in delta if key != "type"]
                message["content"][event["index"]]["text of it"] += text
            case "content_block_stop":
                block = message["content"][event["index"]]
                text = block.pop("text of it")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text)
                else:
                    block[block["type"]] = text
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


@pytest.mark.parametrize(
    ("given", "kinds", "reason"),
    [
        (body(f"say:{SAID}"), ["thinking", "text"], "end_turn"),
        (body(f"say:{SAID}", max_tokens=2), ["thinking"], "max_tokens"),
        (
            body(
                'say:[{"name": "add", "parameters": {"a": 1}}]',
                tools=[TOOL],
                tool_choice={"type": "any"},
            ),
            ["tool_use"],
            "tool_use",
        ),
    ],
)
def test_events_put_together_are_the_whole_message(
    given: dict[str, Any], kinds: list[str], reason: str
) -> None:
    async def test(rig: Rig) -> None:
        rig.frontend.reasoning_parser = "qwen3"
        await rig.gateway.calls.probe()
        whole = (await rig.send("POST", PATH, given)).json
        assert [block["type"] for block in whole["content"]] == kinds
        assert whole["stop_reason"] == reason
        assert whole["usage"]["cache_read_input_tokens"] == 2
        events = events_of(await rig.send("POST", PATH, {**given, "stream": True}))
        assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
        found = assembled(events)
        changed = {"id": whole["id"]}
        for block, own in zip(found["content"], whole["content"], strict=True):
            if "id" in own:
                block["id"] = own["id"]
        assert found | changed == whole

    run(test)


def test_tokens_of_a_prompt_are_counted() -> None:
    async def test(rig: Rig) -> None:
        turns = {"messages": [{"role": "user", "content": "hi"}]}
        found = await rig.send("POST", f"{PATH}/count_tokens", turns)
        same = await rig.send("POST", "/tokenize", turns)
        assert found.json == {"input_tokens": same.json["count"]}

    run(test)


def test_anthropics_header_has_the_key() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.send("POST", PATH, body())).status == 401
        assert (await rig.send("POST", PATH, body(), x_api_key="key-of-acme")).status == 200

    run(test, ApiKeys(None, json.dumps(KEYS)))
