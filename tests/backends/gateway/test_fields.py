"""What a client of OpenAI's interface may say, and what the conductor hears of it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest
from openai.resources import completions
from openai.resources.chat.completions import Completions
from openai.resources.responses import Responses

from backends import tensors
from backends.engine.sampling_params import SamplingParams
from backends.errors import InvalidRequest
from backends.frontend.inputs import InputReader
from backends.frontend.request import ClientRequest, RequestLimits, parse
from backends.gateway.frontend_calls import refusal_of
from backends.gateway.request import fields
from backends.gateway.request.fields import CHAT, COMPLETION
from backends.gateway.request.infer_request import GatewayRequest, infer_request, read_request
from backends.gateway.request.prompts import read_tokenize
from backends.statuses import HttpRefusal
from backends.tensors import TEXT_BYTES_MAX
from backends.text.tokenizer import Tokenizer
from bench.clients.openai_calls import HARMLESS
from loadtest.harness.server import PROJECT
from mooncake_store.block_keys import SALT_SEPARATOR

MESSAGES = [{"role": "user", "content": "hello"}]
SEED = 77
OPTIONS_OF_A_CALL = ("extra_headers", "extra_query", "extra_body")  # of the package, not fields
NUMPY = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


def chat(**more: Any) -> GatewayRequest:
    return read_request(CHAT, {"messages": MESSAGES, **more}, SEED)


def completion(**more: Any) -> GatewayRequest:
    return read_request(COMPLETION, {"prompt": "hello", **more}, SEED)


def refused(route: str, **said: Any) -> HttpRefusal:
    base: dict[str, Any] = {"messages": MESSAGES} if route == CHAT else {"prompt": "hello"}
    with pytest.raises(HttpRefusal) as caught:
        read_request(route, {**base, **said}, SEED)
    assert caught.value.status == 400
    return caught.value


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(PROJECT / "backends" / "demo_checkpoint")


def as_the_conductor_reads(request: GatewayRequest, tokenizer: Tokenizer) -> ClientRequest:
    """The bytes on the wire, taken apart as Triton does, through the frontend's own reading."""
    message = infer_request(request, "id-1")
    inputs = {}
    for each, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        if each.datatype == "BYTES":
            texts, rest = [], raw
            while rest:
                size = int.from_bytes(rest[:4], "little")
                texts.append(rest[4 : 4 + size])
                rest = rest[4 + size :]
            inputs[each.name] = np.array(texts, object)
        else:
            inputs[each.name] = np.frombuffer(raw, NUMPY[each.datatype])
        assert inputs[each.name].size == each.shape[0] * each.shape[1]
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in message.parameters.items()
    }
    return parse(inputs, parameters, tokenizer, RequestLimits(8192, 2048))


def test_every_field_reaches_the_conductor(tokenizer: Tokenizer) -> None:
    asked = chat(
        model="demo",
        max_tokens=40,
        min_tokens=3,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        seed=-1,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        timeout=2.5,
        priority=-3,
        user="me",
        metadata={"a": "b"},
        n=1,
    )
    read = as_the_conductor_reads(asked, tokenizer)
    assert read.sampling == SamplingParams(
        max_tokens=40,
        min_tokens=3,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        end_ids=tokenizer.eos_ids,
        stop_words=("a", "b"),
    )
    assert (read.is_stream, read.timeout_ms, read.priority) == (True, 2500, -3)
    assert read.is_paced, "the frontend may join tokens when it has too many to send"
    assert asked.includes_usage and asked.model == "demo"


def test_what_is_not_said_is_as_in_openais_interface(tokenizer: Tokenizer) -> None:
    read = as_the_conductor_reads(completion(), tokenizer)
    assert (read.sampling.temperature, read.sampling.seed) == (1.0, SEED)
    assert not read.is_stream and read.timeout_ms == 0
    assert read.prompt_ids.tolist() == tokenizer.encode("hello")


def test_fields_that_are_null_say_nothing() -> None:
    names = [each.name for each in fields.FIELDS if CHAT in each.routes and each.name != "messages"]
    names += [each.name for each in fields.UNSUPPORTED if CHAT in each.routes]
    assert chat(**dict.fromkeys(names)) == chat()


def test_every_field_of_the_openai_package_is_known_by_name() -> None:
    """Taken, or refused by its own name: none is a stranger with a likely other one."""
    for route, create in (
        (CHAT, Completions.create),
        (COMPLETION, completions.Completions.create),
        (fields.RESPONSES, Responses.create),
    ):
        named = set(inspect.signature(create).parameters) - {"self", *OPTIONS_OF_A_CALL}
        assert len(named) > 15
        assert named <= fields.TABLES[route][0].keys() | fields.TABLES[route][1].keys()


def test_what_changes_no_answer_is_taken(tokenizer: Tokenizer) -> None:
    with_all, plain = (as_the_conductor_reads(chat(**each), tokenizer) for each in (HARMLESS, {}))
    assert with_all.sampling == plain.sampling
    assert with_all.prompt_ids.tolist() == plain.prompt_ids.tolist()
    more = {"echo": False, "best_of": 1, "suffix": None, "user": "me", "logit_bias": {}}
    assert completion(**more) == completion()


def test_a_message_may_have_what_clients_send_back_of_an_answer() -> None:
    said = {"role": "assistant", "content": "yes"}
    more = {
        "refusal": None,
        "annotations": [{"type": "url_citation"}],
        "tool_calls": None,
        "audio": None,
        "reasoning_content": "hm",
        "provider_specific_fields": {"a": 1},
    }
    kept = said | {"reasoning_content": "hm"}  # for the chat template
    assert chat(messages=[*MESSAGES, said | more]) == chat(messages=[*MESSAGES, kept])
    for wrong in ({"tool_calls": [{"id": "1"}]}, {"audio": {"id": "1"}}, {"image": "x"}):
        refusal = refused(CHAT, messages=[*MESSAGES, said | wrong])
        assert refusal.param == f"messages[1].{next(iter(wrong))}"


def test_a_prompt_may_be_token_ids(tokenizer: Tokenizer) -> None:
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        read = as_the_conductor_reads(completion(prompt=prompt), tokenizer)
        assert read.prompt_ids.tolist() == [5, 6, 7]
    assert completion(prompt=["hello"]) == completion()


def test_ignore_eos_ends_at_max_tokens_only(tokenizer: Tokenizer) -> None:
    read = as_the_conductor_reads(completion(ignore_eos=True, max_tokens=9), tokenizer)
    assert read.sampling.end_ids == ()
    read = as_the_conductor_reads(completion(ignore_eos=False), tokenizer)
    assert read.sampling.end_ids == tokenizer.eos_ids


def test_stop_token_ids_end_the_answer_beside_the_end_token(tokenizer: Tokenizer) -> None:
    read = as_the_conductor_reads(completion(stop_token_ids=[7, 9, 7]), tokenizer)
    assert read.sampling.end_ids == (*tokenizer.eos_ids, 7, 9)
    assert completion(stop_token_ids=[]) == completion()
    read = as_the_conductor_reads(completion(stop_token_ids=[7], ignore_eos=True), tokenizer)
    assert read.sampling.end_ids == (7,)


def test_a_bias_a_salt_and_special_tokens_reach_the_conductor(tokenizer: Tokenizer) -> None:
    read = as_the_conductor_reads(completion(logit_bias={"5": 1, "7": -2.5}), tokenizer)
    assert read.sampling.logit_bias == ((5, 1.0), (7, -2.5))
    assert completion(logit_bias={}) == completion()
    salted = chat(cache_salt="s", tenant="t")
    assert as_the_conductor_reads(salted, tokenizer).cache_salt == f"t{SALT_SEPARATOR}s"
    salts = [{"cache_salt": "a"}, {"tenant": "a"}, {"cache_salt": "ab"}, {}]
    found = {as_the_conductor_reads(chat(**each), tokenizer).cache_salt for each in salts}
    assert len(found) == len(salts)
    for flag in (True, False):
        asked = chat(add_special_tokens=flag)
        assert asked.inputs["add_special_tokens"] is flag
        assert as_the_conductor_reads(asked, tokenizer).prompt_ids.size


def test_token_ids_are_outputs_of_the_conductor() -> None:
    assert set(chat(return_token_ids=True).outputs) >= {"output_ids", "prompt_ids"}
    both = completion(return_token_ids=True, logprobs=1).outputs
    assert len(set(both)) == len(both) and {"prompt_ids", "output_log_probs"} <= set(both)
    assert chat(return_token_ids=False) == chat()


def test_every_ignored_field_is_taken_on_both_routes() -> None:
    values = {"text": "x", "flag": True, "object": {"a": 1}}
    said = {name: values[kind] for name, kind in fields.IGNORED.items()}
    assert chat(**said) == chat() and completion(**said) == completion()


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert chat(max_completion_tokens=5).inputs["max_tokens"] == 5
    assert chat(max_completion_tokens=5, max_tokens=5) == chat(max_tokens=5)
    assert refused(CHAT, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    assert refused(COMPLETION, max_completion_tokens=5).param == "max_completion_tokens"


def test_messages_of_text_parts_and_answers_sent_back_are_understood(tokenizer: Tokenizer) -> None:
    conversation = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}],
        },
        {"role": "user", "content": "hi", "name": "me"},
        {
            "role": "assistant",
            "content": "yes",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
        },
    ]
    asked = chat(messages=conversation)
    assert json.loads(asked.prompts[0]["messages"]) == [
        {"role": "system", "content": conversation[0]["content"]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    assert as_the_conductor_reads(asked, tokenizer).prompt_ids.size


@pytest.mark.parametrize(
    ("route", "said", "param"),
    [
        (CHAT, {"n": 33}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"best_of": 2}, "best_of"),
        (COMPLETION, {"best_of": 33}, "best_of"),
        (CHAT, {"logit_bias": [5]}, "logit_bias"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias.a"),
        (COMPLETION, {"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        (COMPLETION, {"logit_bias": {"5": "1"}}, "logit_bias.5"),
        (CHAT, {"add_special_tokens": 1}, "add_special_tokens"),
        (CHAT, {"return_token_ids": 1}, "return_token_ids"),
        (CHAT, {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        (COMPLETION, {"cache_salt": 5}, "cache_salt"),
        (COMPLETION, {"user": 5}, "user"),
        (CHAT, {"images": ["x"]}, "images"),
        (CHAT, {"max_token": 5}, "max_token"),
        (CHAT, {"max_tokens": "5"}, "max_tokens"),
        (CHAT, {"max_tokens": 2**31}, "max_tokens"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"max_tokens": True}, "max_tokens"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": 1e300}, "temperature"),
        (CHAT, {"temperature": 10**400}, "temperature"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"stop": [5]}, "stop"),
        (CHAT, {"stream": 1}, "stream"),
        (CHAT, {"timeout": 0}, "timeout"),
        (CHAT, {"timeout": -1}, "timeout"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (COMPLETION, {"logprobs": True}, "logprobs"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"response_format": {}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "grammar"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"temperature": 2.1}, "temperature"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop_token_ids": 5}, "stop_token_ids"),
        (CHAT, {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        (CHAT, {"stop": ["a", ""]}, "stop"),
        (CHAT, {"audio": {}}, "audio"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [*MESSAGES, {"role": "bot", "content": "x"}]}, "messages[1].role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
            "messages[0].tool_calls",
        ),
        (COMPLETION, {"prompt": ""}, "prompt"),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": None}, "prompt"),
        (COMPLETION, {"prompt": [["a"], "b"]}, "prompt[0]"),
        (COMPLETION, {"prompt": [1.5]}, "prompt"),
        (COMPLETION, {"seed": 42.5}, "seed"),
        (COMPLETION, {"seed": 1e300}, "seed"),
        (COMPLETION, {"best_of": True}, "best_of"),
        (COMPLETION, {"prompt": [[[1]], [2]]}, "prompt[0]"),
        (COMPLETION, {"prompt": [1, -1]}, "prompt"),
        (COMPLETION, {"prompt": [1, True]}, "prompt"),
        (COMPLETION, {"echo": 1}, "echo"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"prompt_logprobs": True}, "prompt_logprobs"),
        (COMPLETION, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETION, {"suffix": "x"}, "suffix"),
    ],
)
def test_a_wrong_field_is_refused_by_name(route: str, said: dict[str, Any], param: str) -> None:
    refusal = refused(route, **said)
    assert refusal.param == param
    assert param.partition(".")[0].partition("[")[0] in refusal.message


def test_logprobs_are_asked_for_in_each_routes_way(tokenizer: Tokenizer) -> None:
    for asked, top in (
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=4), 4),
        (completion(logprobs=0), 0),
        (completion(logprobs=3), 3),
    ):
        assert as_the_conductor_reads(asked, tokenizer).sampling.top_logprobs == top
        assert set(asked.outputs) >= {"output_ids", "output_log_probs"}
    for asked in (chat(), chat(logprobs=False), completion()):
        assert as_the_conductor_reads(asked, tokenizer).sampling.top_logprobs < 0
        assert "output_log_probs" not in asked.outputs


def test_logprobs_of_the_prompt_are_asked_for_by_two_fields(tokenizer: Tokenizer) -> None:
    for asked, top in (
        (chat(prompt_logprobs=0), 0),
        (completion(prompt_logprobs=3), 3),
        (completion(echo=True, logprobs=2), 2),
        (completion(echo=True, logprobs=2, prompt_logprobs=4), 4),
        (completion(echo=True, logprobs=5, prompt_logprobs=1), 5),
    ):
        assert as_the_conductor_reads(asked, tokenizer).sampling.prompt_logprobs == top
        assert set(asked.outputs) >= set(tensors.PROMPT_OUTPUTS)
    for asked in (chat(logprobs=True), completion(logprobs=2), completion(echo=True)):
        assert as_the_conductor_reads(asked, tokenizer).sampling.prompt_logprobs < 0
        assert not set(asked.outputs) & set(tensors.PROMPT_OUTPUTS)
    refusal = refusal_of(
        "invalid_request: prompt_logprobs is not supported by a pipeline group of workers",
        completion(echo=True, logprobs=1).names,
    )
    assert (refusal.status, refusal.param) == (400, "echo")


def test_a_completion_without_tokens_is_one_token_for_the_conductor(tokenizer: Tokenizer) -> None:
    read = as_the_conductor_reads(completion(max_tokens=0), tokenizer)
    assert read.sampling.max_tokens == 1


def test_a_response_format_is_the_conductors_schema(tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    asked = chat(response_format=named)
    assert json.loads(asked.inputs["guided_json"]) == schema
    assert list(json.loads(asked.inputs["guided_json"])["properties"]) == ["b", "a"], "their order"
    assert as_the_conductor_reads(asked, tokenizer).sampling.guide
    asked = completion(response_format={"type": "json_object"})
    assert json.loads(asked.inputs["guided_json"]) == {"type": "object"}
    assert chat(response_format={"type": "text"}) == chat()


def test_a_misspelt_field_is_answered_with_the_likely_name() -> None:
    assert refused(CHAT, max_tokns=5).message.endswith("did you mean max_tokens?")


@pytest.mark.parametrize("content", [None, [], "x", 5, [{}]])
def test_a_body_that_is_no_object_is_refused(content: object) -> None:
    with pytest.raises(HttpRefusal) as caught:
        read_request(CHAT, content, SEED)
    assert caught.value.status == 400 and caught.value.param is None


def test_neutral_values_of_unsupported_fields_ask_for_nothing() -> None:
    said = {
        each.name: value
        for each in fields.UNSUPPORTED
        if CHAT in each.routes
        for value in each.neutral[:1]
    }
    assert chat(**said) == chat()


@pytest.mark.parametrize(
    ("said", "param", "message"),
    [
        ("top_p is 5.0; use a number", "top_p", "top_p is 5.0; use a number"),
        ("stop_words[1] is not valid", "stop", "stop[1] is not valid"),
        ("text_input has 5 bytes", "prompt", "prompt has 5 bytes"),
        ("parameter timeout_ms is 5", "timeout", "timeout is 5"),
        ("the prompt has 9 tokens", "prompt", "the prompt has 9 tokens"),
    ],
)
def test_the_conductors_words_name_openais_field(
    said: str, param: str | None, message: str
) -> None:
    refusal = refusal_of(f"invalid_request: {said}", {})
    assert (refusal.status, refusal.param, refusal.message) == (400, param, message)


def test_every_tensor_that_is_sent_is_one_of_the_conductors() -> None:
    asked = chat(
        max_tokens=4,
        min_tokens=1,
        top_p=0.5,
        top_k=2,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=1,
        stop="x",
        ignore_eos=True,
    )
    sent = infer_request(asked, "x").inputs
    known = {each.name: each.dtype.replace("STRING", "BYTES") for each in tensors.SUPPORTED_INPUTS}
    assert {each.name: each.datatype for each in sent}.items() <= known.items()
    assert not InputReader({each.name: np.zeros(0) for each in sent}).problems


def test_tokenize_takes_a_text_or_messages() -> None:
    assert read_tokenize({"prompt": "a"}).prompt == "a"
    assert read_tokenize({"messages": MESSAGES, "model": None}).messages == MESSAGES
    for wrong in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 5}, {"promt": "a"}):
        with pytest.raises(HttpRefusal):
            read_tokenize(wrong)


def test_whole_numbers_may_be_written_as_floats(tokenizer: Tokenizer) -> None:
    """Gson writes every number so."""
    asked = completion(
        prompt=[5.0, 6],
        max_tokens=4.0,
        min_tokens=1.0,
        seed=42.0,
        n=1.0,
        best_of=1.0,
        top_k=3.0,
        length_penalty=1.0,
        priority=2.0,
    )
    read = as_the_conductor_reads(asked, tokenizer)
    assert read.prompt_ids.tolist() == [5, 6]
    assert (read.sampling.seed, read.sampling.max_tokens, read.sampling.top_k) == (42, 4, 3)
    assert read.priority == 2


def test_too_long_a_list_of_prompts_is_refused_with_how_many_are_allowed() -> None:
    refusal = refused(COMPLETION, prompt=["a"] * 129)
    assert refusal.message == "prompt is a list of 129 prompts; send at most 128"


LONG = "word " * 50_000


@pytest.mark.parametrize(
    ("route", "said", "param"),
    [
        (COMPLETION, {"stop": ["x" * 10_000]}, "stop"),
        (CHAT, {"stop": [str(number) for number in range(100)]}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (COMPLETION, {"prompt": LONG}, "prompt"),
        (COMPLETION, {"prompt": [5] * 50_000}, "prompt"),
        (COMPLETION, {"prompt": [2**30]}, "prompt"),
        (COMPLETION, {"max_tokens": 10**6}, "prompt"),  # with the code of a context exceeded
        (CHAT, {"max_tokens": 10**6}, "messages"),
        (COMPLETION, {"max_tokens": -1}, "max_tokens"),
        (COMPLETION, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (COMPLETION, {"repetition_penalty": -1}, "repetition_penalty"),
        (CHAT, {"tenant": "x" * 300}, "tenant"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETION, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETION, {"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        (COMPLETION, {"echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETION, {"echo": True, "logprobs": -1}, "logprobs"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"tenant": "a\0b"}, "tenant"),
        (CHAT, {"cache_salt": "x" * 300}, "cache_salt"),
        (CHAT, {"logit_bias": {"2048": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"logit_bias": {"9" * 400: 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        (CHAT, {"logit_bias": {str(number): 1 for number in range(9_000)}}, "logit_bias"),
    ],
)
def test_what_the_conductor_refuses_names_the_clients_field(
    route: str, said: dict[str, Any], param: str, tokenizer: Tokenizer
) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if route == CHAT else {"prompt": "hello"}
    asked = read_request(route, {**base, **said}, SEED)
    with pytest.raises(InvalidRequest) as caught:
        as_the_conductor_reads(asked, tokenizer)
    refusal = refusal_of(caught.value.wire_message(), asked.names)
    assert (refusal.status, refusal.param) == (400, param)


def test_tokenize_takes_as_much_text_as_the_conductor() -> None:
    for said in ({"prompt": "é" * (TEXT_BYTES_MAX // 2)}, {"prompt": "x" * TEXT_BYTES_MAX}):
        read_tokenize(said)
    long = "é" * (TEXT_BYTES_MAX // 2) + "x"
    half = {"role": "user", "content": long[: len(long) // 2 + 1]}
    for name, said in (("prompt", long), ("messages", [half, half])):
        with pytest.raises(HttpRefusal, match="4,194,304") as refusal:
            read_tokenize({name: said})
        assert refusal.value.param == name
