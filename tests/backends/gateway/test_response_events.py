"""Events of /v1/responses, put together again as OpenAI's own package does, and its types."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from backends.gateway.answer.pieces import AnswerPiece, ChoiceWriter
from backends.gateway.responses.events import ResponseEvents, new_response
from backends.gateway.responses.request import read_responses
from backends.gateway.responses.stored import EarlierResponses, StoredResponses
from backends.statuses import HttpRefusal
from backends.text.reasoning import TAGS, Thinking, ThinkingReader
from backends.text.tool_calls.formats import FORMATS
from backends.text.tool_calls.parser import CallParser

NOTHING_STORED = EarlierResponses(StoredResponses(), "")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = '<tool_call>{"name": "f", "arguments": {"a": %d}}</tool_call>'
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def events_of(body: bytes) -> Iterator[dict[str, Any]]:
    for part in body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def without_extras(model: BaseModel) -> None:
    """Fails if a field is not one of OpenAI's."""
    extras = set(model.model_extra or ()) - {"store"}  # documented, but not in the types
    assert not extras, (type(model).__name__, extras)
    for value in vars(model).values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                without_extras(each)


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas build."""
    output: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case ["content_part", "added"]:
                output[event["output_index"]]["content"].append(event["part"])
            case ["output_text" | "reasoning_text", "delta"]:
                assert output[-1]["id"] == event["item_id"]
                part = output[-1]["content"][event["content_index"]]
                part["text"] += event["delta"]
            case ["output_text" | "reasoning_text", "done"]:
                assert output[-1]["content"][0]["text"] == event["text"]
            case ["function_call_arguments", "delta"]:
                output[event["output_index"]]["arguments"] += event["delta"]
            case ["function_call_arguments", "done"]:
                assert output[-1]["arguments"] == event["arguments"]
            case ["output_item", "done"]:
                item = event["item"]
                assert {**output[-1], "status": item["status"]} == item
                output[-1] = item
    return output


def answer(chance: random.Random) -> str:
    text = ""
    if chance.random() < 0.5:
        text += f"<think>{'hm ' * chance.randrange(4)}</think>\n\n"
    for _ in range(chance.randrange(4)):
        text += chance.choice(["Hello wörld. ", "a < b ", CALL % chance.randrange(99)])
    return text


def pieces_of(text: str, chance: random.Random) -> list[AnswerPiece]:
    raw, found, at = text.encode(), [], 0
    while at < len(raw):
        size = chance.randrange(1, 9)
        found.append(raw[at : at + size].decode("utf-8", "ignore").encode() or raw[at : at + 1])
        while True:
            try:
                found[-1].decode()
                break
            except UnicodeDecodeError:
                found[-1] = raw[at : at + len(found[-1]) + 1]
        at += len(found[-1])
    reason = chance.choice(["end_id", "length", "stop_word"])
    made = [AnswerPiece(each, "", 1, 5, 2) for each in found]
    return [*made, AnswerPiece(b"", reason, 0, 5, 2)]


def writer(chance: random.Random) -> ChoiceWriter:
    new_id = iter(range(1000))
    calls = CallParser(FORMATS["hermes"], ["f"], lambda *_: f"call_{next(new_id)}")
    has_calls, thinks = chance.random() < 0.7, chance.random() < 0.7
    found = calls if has_calls else None
    return ChoiceWriter(None, ThinkingReader(Thinking(TAGS, False), found) if thinks else found)


def begun(seed: int) -> tuple[ResponseEvents, list[AnswerPiece]]:
    chance = random.Random(seed)
    body = {"input": "hi", "stream": True, "tools": [FUNCTION], "instructions": "Be kind."}
    wanted = read_responses(body, 1, NOTHING_STORED)
    made = new_response(wanted, f"resp_{seed}", 1, "demo")
    return ResponseEvents(made, writer(chance)), pieces_of(answer(chance), chance)


def test_events_put_together_are_the_whole_response_and_of_openais_types() -> None:
    kinds = set()
    for seed in range(500):
        stream, pieces = begun(seed)
        events = [event for piece in pieces for event in events_of(stream.event(piece))]
        assert stream.is_over
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            without_extras(EVENT.validate_python(event))
        last = events[-1]["response"]
        assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == f"response.{last['status']}"
        assert assembled(events) == last["output"]
        without_extras(Response.model_validate(last))
        kinds |= {item["type"] for item in last["output"]}
        other, again = begun(seed)
        assert json.loads(other.whole(again)) == last
        assert last["usage"]["output_tokens"] == len(pieces) - 1
    assert kinds == {"message", "reasoning", "function_call"}


def test_an_answer_that_fails_after_its_first_event_ends_with_a_failed_response() -> None:
    stream, pieces = begun(1)
    events = list(events_of(stream.event(pieces[0])))
    events += events_of(stream.error(HttpRefusal(503, "unavailable", "the worker is gone")))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {
        "code": "server_error",
        "message": "the worker is gone",
    }
    without_extras(EVENT.validate_python(events[-1]))
    assert stream.is_over


def test_an_answer_cut_off_by_its_limit_is_incomplete() -> None:
    stream, _ = begun(2)
    stream.event(AnswerPiece(b"abc", "", 3, 5))
    events = list(events_of(stream.event(AnswerPiece(b"", "length", 0, 5))))
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == ("response.incomplete", "incomplete")
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][-1]["status"] == "incomplete"
