"""Tools over OpenAI's interface: what the conductor gets, and what the client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.gateway.app import PATHS
from backends.gateway.request.fields import CHAT
from backends.gateway.request.infer_request import GatewayRequest, read_request
from backends.statuses import HttpRefusal
from backends.tensors import STRUCTURAL_TAG
from backends.text.json_schema import read_schema
from backends.text.tool_calls.formats import FORMATS
from backends.text.tool_calls.formats import HERMES as HERMES_FORMAT
from tests.backends.gateway.rig import HttpAnswer, Rig, run
from tests.backends.text.test_guide_kinds import is_followed

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "the sum",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(**fields: Any) -> GatewayRequest:
    messages = [{"role": "user", "content": "hi"}]
    return read_request(CHAT, {"messages": messages, "tools": [ADD], **fields}, 7)


def messages_of(request: GatewayRequest) -> list[Any]:
    return list(json.loads(request.prompts[0]["messages"]))


def test_the_conductor_gets_the_functions_with_every_choice() -> None:
    for choice in ("none", "auto", "required", NAMED, None):
        request = read(tool_choice=choice)
        assert json.loads(request.prompts[0]["tools"]) == [ADD], choice
        assert ("guided_json" in request.inputs) == (choice in ("required", NAMED))
    assert "tools" not in read(tools=[]).prompts[0]


def test_a_named_call_is_guided_by_its_closed_parameters() -> None:
    schema = json.loads(read(tool_choice=NAMED).inputs["guided_json"])
    assert schema == {**ADD["function"]["parameters"], "additionalProperties": False}


@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_are_guided_by_a_list(is_parallel: bool) -> None:
    inputs = read(tool_choice="required", parallel_tool_calls=is_parallel).inputs
    schema = json.loads(inputs["guided_json"])
    assert read_schema(inputs["guided_json"])[1] == []
    assert schema["minItems"] == 1 and schema.get("maxItems") == (None if is_parallel else 1)


def test_strict_functions_are_guided_in_a_format_that_a_grammar_can_force() -> None:
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    free = {"type": "function", "function": {"name": "free", "parameters": ADD["function"]}}
    tools = read(tools=[strict, free]).tools
    assert tools is not None
    form = tools.strict_form(HERMES_FORMAT)
    assert form is not None and (form.field, form.kind) == ("tools", STRUCTURAL_TAG)
    allowed = '<tool_call>\n{"name": "free", "arguments": {"x": null}}\n</tool_call>'
    for answer, is_allowed in (
        (HERMES, True),
        (allowed, True),
        (HERMES.replace("1", '"1"'), False),
    ):
        assert is_followed(form.kind, form.text, answer) == is_allowed, answer
    for each in FORMATS.values():
        assert (tools.strict_form(each) is None) == (each is not HERMES_FORMAT)
    for fields in ({}, {"tools": [strict], "tool_choice": "required"}):
        others = read(**fields).tools
        assert others is not None and others.strict_form(HERMES_FORMAT) is None


def test_an_answer_of_strict_functions_is_guided_and_its_calls_are_found() -> None:
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}

    async def test(rig: Rig) -> None:
        message, _, stream = await chat(rig, HERMES, tools=[strict])
        assert called(message) == called(stream) == [("add", '{"a": 1}')]
        sent = {each.name for each in rig.frontend.requests[-1].inputs}
        assert {"guided_decoding_guide", "guided_decoding_guide_type"} <= sent
        wrong = {"name": "f", "strict": True, "parameters": {"type": "object", "minimun": 1}}
        answer = await rig.post(CHAT, tools=[{"function": wrong}])
        assert (answer.status, answer.error["param"]) == (400, "tools")
        await chat(rig, HERMES)
        sent = {each.name for each in rig.frontend.requests[-1].inputs}
        assert "guided_decoding_guide" not in sent

    run(test)


def test_calls_and_results_of_earlier_answers_reach_the_conductor() -> None:
    talk = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1"},
        {"role": "assistant", "content": None},
    ]
    function = {"name": "add", "arguments": {"a": 1}}
    assert messages_of(read(messages=talk, tools=None))[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 1}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"tools": [{"function": {"name": "f", "parameters": {"minimun": 1}}}],
          "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpRefusal) as refusal:
        read(**fields)
    assert refusal.value.status == 400 and refusal.value.param == param


def message_of(answer: HttpAnswer) -> dict[str, Any]:
    return dict(answer.json["choices"][0]["message"])


def streamed(answer: HttpAnswer) -> dict[str, Any]:
    """The message that a client makes of the events, with `finish_reason`."""
    found: dict[str, Any] = {"content": "", "tool_calls": [], "finish_reason": None}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
            for call in delta.get("tool_calls", []):
                if call["index"] == len(found["tool_calls"]):
                    assert call["type"] == "function" and call["id"] and call["function"]["name"]
                    found["tool_calls"].append({**call, "function": dict(call["function"])})
                    continue
                arguments = call["function"]["arguments"]
                found["tool_calls"][call["index"]]["function"]["arguments"] += arguments
    assert answer.events[-1] == "[DONE]"
    return found


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(each["name"], each["arguments"]) for each in functions]


async def chat(rig: Rig, said: str, **fields: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """(message, finish reason, streamed message) of an answer with these words."""
    messages = [{"role": "user", "content": f"say:{said}"}]
    fields = {"messages": messages, "tools": [ADD], **fields}
    answer = await rig.post(CHAT, **fields)
    assert answer.status == 200, answer.body
    stream = await rig.post(CHAT, stream=True, **fields)
    return message_of(answer), answer.json["choices"][0]["finish_reason"], streamed(stream)


def test_calls_in_the_format_of_the_model_are_found_whole_and_streamed() -> None:
    async def test(rig: Rig) -> None:
        message, reason, stream = await chat(rig, f"One moment. {HERMES}\n{HERMES}")
        assert reason == stream["finish_reason"] == "tool_calls"
        assert message["content"] == stream["content"] == "One moment."
        assert called(message) == called(stream) == [("add", '{"a": 1}')] * 2
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
        message, _, _ = await chat(rig, HERMES)
        assert message["content"] is None

    run(test)


def test_an_answer_without_a_call_is_text() -> None:
    async def test(rig: Rig) -> None:
        for said in ("plain", "a <tool_call> b", "<tool_call>x</tool_call>"):
            message, reason, stream = await chat(rig, said)
            assert (message["content"], reason) == (said, "stop") and "tool_calls" not in message
            assert (stream["content"], stream["finish_reason"]) == (said, "stop")

    run(test)


def test_with_choice_none_a_call_is_text() -> None:
    async def test(rig: Rig) -> None:
        message, reason, stream = await chat(rig, HERMES, tool_choice="none")
        assert message["content"] == stream["content"] == HERMES and reason == "stop"

    run(test)


def test_a_call_that_breaks_off_ends_with_reason_length() -> None:
    async def test(rig: Rig) -> None:
        message, reason, stream = await chat(rig, HERMES, max_tokens=9)
        assert reason == stream["finish_reason"] == "length"
        assert called(message) == called(stream) == [("add", '{"a"')]

    run(test)


def test_a_named_call_has_the_answer_as_arguments() -> None:
    async def test(rig: Rig) -> None:
        message, reason, stream = await chat(rig, '{"a": 1234567}', tool_choice=NAMED)
        assert reason == stream["finish_reason"] == "tool_calls" and message["content"] is None
        assert called(message) == called(stream) == [("add", '{"a": 1234567}')]

    run(test)


def test_required_calls_are_read_from_the_list() -> None:
    async def test(rig: Rig) -> None:
        said = '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {}}]'
        message, reason, stream = await chat(rig, said, tool_choice="required")
        assert called(message) == called(stream) == [("add", '{"a": 1}'), ("add", "{}")]
        assert reason == "tool_calls"

    run(test)


def test_counts_and_logprobs_of_held_text_are_in_a_later_event() -> None:
    async def test(rig: Rig) -> None:
        messages = [{"role": "user", "content": f"say:{HERMES}"}]
        answer = await rig.post(
            CHAT,
            messages=messages,
            tools=[ADD],
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        *events, last, done = answer.events
        logprobs = [event["choices"][0]["logprobs"] for event in events]
        tokens = sum(len(each["content"]) for each in logprobs if each)
        assert tokens == last["usage"]["completion_tokens"] > 5 and done == "[DONE]"

    run(test)


def test_an_answer_that_follows_a_format_is_text() -> None:
    async def test(rig: Rig) -> None:
        said = '{"name": "add", "arguments": {}}'
        wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
        message, reason, stream = await chat(rig, said, response_format=wanted)
        assert message["content"] == stream["content"] == said and reason == "stop"

    run(test)


def test_a_lone_surrogate_in_earlier_arguments_is_passed_on_as_text() -> None:
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    call = {"id": "c1", "type": "function", "function": function}
    [sent] = messages_of(read(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert sent["tool_calls"][0]["function"] == function
    assert messages_of(read(messages=[{"role": "tool", "content": []}])) == [
        {"role": "tool", "content": ""}
    ]


def test_a_deep_schema_is_answered_or_refused_with_400() -> None:
    async def test(rig: Rig) -> None:
        for levels in range(50, 1100, 75):
            nested = "[" * levels + "]" * levels
            parameters = f'{{"type": "object", "default": {nested}}}'
            tools = f'[{{"function": {{"name": "f", "parameters": {parameters}}}}}]'
            named = '{"type": "function", "function": {"name": "f"}}'
            for choice in ('"required"', named, '"auto"'):
                body = (
                    f'{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 1, '
                    f'"tools": {tools}, "tool_choice": {choice}}}'
                )
                answer = await rig.send("POST", PATHS[CHAT], body.encode())
                assert answer.status in (200, 400), (levels, choice, answer.body)
                assert answer.status == 200 or levels > 50

    run(test)
