"""A request is complete and within all limits, or refused with every problem at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import tensors
from backends.errors import InvalidRequest
from backends.frontend.request import ClientRequest, parse, parse_prompt
from backends.text.tokenizer import Tokenizer
from mooncake_store.block_keys import SALT_SEPARATOR
from tests.backends.asking import DTYPES, LIMITS, TOKENIZER, array, ask, assert_matches, refusal
from tests.backends.small_tokenizers import BOS, byte_level, tokenizer_of


def test_only_a_prompt_is_needed_and_every_default_is_filled_in() -> None:
    request = ask()
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_ids.tolist() == TOKENIZER.encode("hello")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (256, 0)
    assert sampling.is_greedy and sampling.seed == 0
    assert sampling.end_ids == TOKENIZER.eos_ids and sampling.stop_words == ()
    assert not (request.is_stream or request.wants_decision)
    assert not (request.includes_prompt or request.describe)
    assert (request.cache_salt, request.priority, request.stream_interval) == ("", 0, 0)
    assert (request.prefill_worker, request.decode_worker) == ("", "")


def test_everything_that_may_be_said_arrives() -> None:
    request = ask(
        {
            "tenant": "blue",
            "cache_salt": "salt",
            "request_priority": -3,
            "prefill_worker": "prefill_1",
            "decode_worker": "d",
            "timeout_ms": 2500,
            "triton_enable_empty_final_response": True,
        },
        max_tokens=9,
        min_tokens=2,
        stream=True,
        stream_interval=4,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        seed=2**64 - 1,
        stop_words=["a", "日本"],
        end_id=3,
        pad_id=2,
        return_decision=True,
        exclude_input_in_output=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        beam_width=1,
        bad_words=[""],
        num_return_sequences=1,
        length_penalty=1.0,
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 2, 5)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.7, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, -0.5)
    assert (sampling.frequency_penalty, sampling.seed) == (0.5, 2**64 - 1)
    assert (sampling.stop_words, sampling.end_ids) == (("a", "日本"), (3,))
    assert (request.is_stream, request.stream_interval) == (True, 4)
    assert (request.cache_salt, request.priority) == (f"blue{SALT_SEPARATOR}salt", -3)
    assert (request.prefill_worker, request.decode_worker) == ("prefill_1", "d")
    assert request.timeout_ms == 2500
    assert request.wants_decision and not request.includes_prompt


def test_a_request_id_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="parameter id is 5"):
        ask(parameters={"id": 5})


def test_streaming_sends_each_token_unless_told_otherwise() -> None:
    assert ask(stream=True).stream_interval == 1
    assert ask(stream=False, stream_interval=5).stream_interval == 0


# --- prompts


def test_prompts_come_as_text_ids_or_messages() -> None:
    assert ask(input_ids=[5, 6, 7]).prompt_ids.tolist() == [5, 6, 7]
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    prompt = ask(messages=json.dumps(chat)).prompt_ids.tolist()
    assert TOKENIZER.decode(prompt, skip_special=False) == f"{BOS}<user>a\nb<assistant>"
    arrays = {"text_input": array("text_input", "hello")}
    assert parse_prompt(arrays, TOKENIZER, LIMITS).tolist() == TOKENIZER.encode("hello")


def test_special_tokens_are_added_to_a_text_and_not_to_a_chat_unless_told_otherwise() -> None:
    begin = TOKENIZER.encode("", add_special=True)
    assert begin and TOKENIZER.encode("", add_special=False) == []
    chat = json.dumps([{"role": "user", "content": "a"}])
    for prompt in ({"text_input": "hello"}, {"messages": chat}):
        with_it, without = (
            ask(**prompt, add_special_tokens=each).prompt_ids.tolist() for each in (True, False)
        )
        assert with_it == begin + without
        default = ask(**prompt).prompt_ids.tolist()
        assert default == (without if "messages" in prompt else with_it)
    ids = ask(input_ids=[5, 6], add_special_tokens=True).prompt_ids.tolist()
    assert ids == [5, 6]


def test_the_prompt_precedes_the_answer_only_if_it_is_explicitly_not_excluded() -> None:
    request = ask(text_input="hello é", exclude_input_in_output=False)
    assert request.includes_prompt and request.prompt_text == "hello é"
    assert not ask(text_input="hello é").includes_prompt


def test_the_prompt_never_precedes_a_streamed_answer() -> None:
    """As in TensorRT-LLM, whose own client adds up the streamed pieces and expects no prompt."""
    request = ask(text_input="hello é", stream=True, exclude_input_in_output=False)
    assert not request.includes_prompt and not request.prompt_text


def test_describe_needs_no_prompt() -> None:
    request = parse({}, {"describe": True}, TOKENIZER, LIMITS)
    assert request.describe and len(request.prompt_ids) == 0


LONG_CHAT = json.dumps([{"role": "user", "content": "hello " * 2000}])
CHAT = json.dumps([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"text_input": ""}, "the prompt is empty; put at least one token into text_input"),
        ({"text_input": []}, "text_input has 0 values"),
        ({"text_input": ["a", "b"]}, "text_input has 2 values; send one"),
        ({"text_input": "a", "input_ids": [1]}, "given 2 times; send exactly one of text_input"),
        ({"text_input": b"ab\xff"}, "text_input is not valid UTF-8 at byte 2"),
        ({"text_input": "x" * (4 * 1024**2 + 1)}, "4,194,305 bytes; send at most 4,194,304"),
        ({"text_input": "hello " * 2000}, "length is 512 tokens.*leaves no room for output"),
        ({"messages": LONG_CHAT}, "length is 512 tokens.*leaves no room for output"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [1] * 512}, "512 tokens, which leaves no room.*at most 511"),
        ({"input_ids": [1, -1, 999, 2]}, "2 token id.* the first is -1 at index 1; use 0 to 340"),
        ({"messages": ""}, "the prompt is empty"),
        ({"messages": "[]"}, r"messages is \[\]; send a JSON list with at least one message"),
        ({"messages": "{"}, "messages is not valid JSON"),
        ({"messages": "[" * 100_000}, "messages is not valid JSON"),
        ({"messages": '["hi"]'}, r"messages\[0\] is 'hi'; send an object with role and content"),
        ({"messages": '[{"role": "user"}]'}, r"messages\[0\] has no content"),
        ({"messages": '[{"role": "", "content": "a"}]'}, "role is empty"),
        ({"messages": '[{"role": "user", "content": 5}]'}, "content is 5; send a string"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "content is not valid UTF-8"),
        ({"messages": '[{"role": "a", "content": "b", "tool_calls": 1}]'}, "is not a list"),
        ({"messages": '[{"role": "a", "content": "b", "functions": 1}]'}, "has 'functions'"),
        ({"messages": '[{"content": "b"}]'}, r"messages\[0\] has no role"),
        ({"messages": CHAT, "tools": "[1]"}, r"tools\[0\] is not an object"),
        ({"messages": CHAT, "tools": "{"}, "tools is not valid JSON"),
        ({"text_input": "a", "tools": "[]"}, "tools needs messages; the prompt is text_input"),
        ({"messages": CHAT, "chat_template_kwargs": "[]"}, "send a JSON object"),
        ({"messages": CHAT, "chat_template_kwargs": '{"messages": 1}'}, "has messages, which"),
        ({"messages": '[{"role": "a", "content": [{"type": "image"}]}]'}, "only parts of type"),
        ({"messages": '[{"role": "a", "content": [{"type": "text"}]}]'}, "text is None"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_reason(inputs: dict[str, Any], expected: str) -> None:
    assert_matches(expected, refusal(**inputs))


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="no prompt; send exactly one of text_input, input_ids"
    ):
        parse({}, {}, TOKENIZER, LIMITS)


def test_messages_need_a_chat_template() -> None:
    chat = array("messages", json.dumps([{"role": "user", "content": "a"}]))
    with pytest.raises(InvalidRequest, match="no chat template; send text_input"):
        parse({"messages": chat}, {}, tokenizer_of("byte_level"), LIMITS)


# --- parameters


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"max_tokenz": 5}, "unknown parameter 'max_tokenz'; did you mean max_tokens?"),
        ({"tennant": "x"}, "unknown parameter 'tennant'; did you mean tenant?"),
        ({"qqqq": 1}, "unknown parameter 'qqqq'; known: request_priority, tenant, cache_salt"),
        ({"max_tokens": 5}, "max_tokens is an input, not a parameter; send it as a tensor INT32"),
        ({"request_priority": "high"}, "parameter request_priority is 'high'; send an integer"),
        ({"request_priority": True}, "parameter request_priority is True; send an integer"),
        ({"request_priority": 2**40}, "send an integer, at most"),
        ({"timeout_ms": -5}, "parameter timeout_ms is -5; send 1 or more, or leave it out"),
        ({"timeout_ms": "1 s"}, "parameter timeout_ms is '1 s'; send an integer"),
        ({"tenant": 5}, "parameter tenant is 5; send a string"),
        ({"tenant": "x" * 257}, "parameter tenant is longer than 256"),
        ({"describe": "yes"}, "parameter describe is 'yes'; send true or false"),
        ({f"unknown_{n}": n for n in range(50)}, "and 47 more of this kind"),
    ],
)
def test_a_parameter_that_means_nothing_is_refused_with_a_hint(
    parameters: dict[str, Any], expected: str
) -> None:
    assert_matches(expected, refusal(parameters))


def test_all_problems_are_told_at_once() -> None:
    message = refusal(
        {"max_tokenz": 5},
        text_input=b"\xff",
        temperature=float("nan"),
        top_p=2.0,
        beam_width=2,
        stop_words=["a", ""],
        seed=1,
        random_seed=2,
        stream_interval=-1,
    )
    for part in (
        "max_tokenz",
        "UTF-8",
        "temperature",
        "top_p",
        "beam_width",
        "] is empty",
        "random_seed",
        "stream_interval",
    ):
        assert part in message, part


def test_a_tensor_of_another_type_or_name_is_refused() -> None:
    inputs = {
        "text_input": array("text_input", "a"),
        "max_tokens": np.array([1.5], np.float32),
        "stream": np.array([1], np.int32),
        "temperatur": np.array([1.0]),
    }
    with pytest.raises(InvalidRequest) as caught:
        parse(inputs, {}, TOKENIZER, LIMITS)
    assert_matches("max_tokens has type float32; send it as INT32", str(caught.value))
    assert_matches("stream has type int32; send it as BOOL", str(caught.value))
    assert_matches("unknown input 'temperatur'; did you mean temperature", str(caught.value))


# --- anything at all

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=8),
    st.text(st.characters(codec=None), max_size=8),
)
JSON_TEXTS = st.recursive(
    SCALARS.filter(lambda value: not isinstance(value, bytes)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "max_tokens", "top_k", "stop", "seed", "type", "text"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())
OBJECTS = st.lists(SCALARS | JSON_TEXTS, max_size=3).map(
    lambda values: np.array([*values, None], np.object_)[:-1]
)
NUMBERS = st.tuples(
    st.sampled_from(
        [np.int32, np.float32, np.bool_, np.uint64, np.int64, np.uint8, np.float16, np.complex64]
    ),
    st.lists(st.integers(-3, 3) | st.integers(-60_000, 60_000), max_size=4),
).map(lambda pair: np.array(pair[1], np.int64).astype(pair[0]))
FLOATS = st.lists(st.floats(width=32), max_size=2).map(lambda values: np.array(values, np.float32))
PARAMETERS = st.dictionaries(
    st.sampled_from([*tensors.PARAMETERS, "max_tokens"]) | st.text(max_size=4), SCALARS, max_size=3
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    inputs=st.dictionaries(
        st.sampled_from([*DTYPES, "strange"]), OBJECTS | NUMBERS | FLOATS, max_size=6
    ),
    parameters=PARAMETERS,
)
def test_garbage_is_refused_or_understood_but_never_crashes(
    inputs: dict[str, np.ndarray], parameters: dict[str, Any]
) -> None:
    try:
        request = parse(inputs, parameters, TOKENIZER, LIMITS)
    except InvalidRequest as error:
        assert str(error) and len(str(error)) < 20_000
    else:
        assert isinstance(request, ClientRequest)
        assert request.describe or 1 <= len(request.prompt_ids) < LIMITS.context_tokens_max


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(["messages", "sampling_parameters"]), text=JSON_TEXTS)
def test_any_json_is_refused_or_understood(name: str, text: bytes) -> None:
    inputs = {"messages": None, "sampling_parameters": None, name: text}
    if name != "messages":
        inputs["text_input"] = b"hello"
    try:
        ask(**{key: value for key, value in inputs.items() if value is not None})
    except InvalidRequest as error:
        assert str(error)


def test_tools_and_variables_of_the_template_reach_the_prompt() -> None:
    template = (
        "{{ tools[0].function.name if tools }}{{ style }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})

    def prompt(**more: Any) -> str:
        call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        inputs = {"messages": talk, **more}
        sent = {name: array(name, json.dumps(value)) for name, value in inputs.items()}
        return tokenizer.decode(parse(sent, {}, tokenizer, LIMITS).prompt_ids.tolist())

    assert prompt() == "af!"
    tools = [{"type": "function", "function": {"name": "g"}}]
    options = {"style": "S", "add_generation_prompt": False}
    assert prompt(tools=tools, chat_template_kwargs=options) == "gSaf"
