"""Tool calls: parsers of each model's format, prompts with tools, and schemas that force calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from backends.config_pbtxt import TOOL_CALL_PARSERS
from backends.text.tokenizer import Tokenizer
from backends.text.tool_calls.formats import FORCED, FORMATS, ToolCallFormat, format_of
from backends.text.tool_calls.parser import CallParser, CallPart
from backends.text.tool_calls.requests import read_calls, read_functions
from tests.backends.small_tokenizers import byte_level

NAMES = ("get_weather", "add", "files.read")
WEATHER, ADD = ("get_weather", {"city": 'Pa}r"is', "days": [1, 2]}), ("add", {"a": 1, "b": 2.5})
Calls = list[tuple[str, str]]  # (name, arguments) of each


def parsed(
    written: ToolCallFormat, text: str, cuts: Sequence[int] = (), calls_max: int | None = None
) -> tuple[str, Calls, list[str]]:
    """(text, calls, ids) of an answer that arrives cut at these positions."""
    parser = CallParser(written, NAMES, lambda name, index: f"{name}-{index}", calls_max)
    parts, last = [], 0
    for cut in [*cuts, len(text)]:
        parts += parser.push(text[last:cut])
        last = cut
    parts += parser.finish()
    calls: list[list[str]] = []
    ids = []
    for part in parts:
        if isinstance(part, CallPart):
            if part.name:
                assert part.index == len(calls) and part.call_id
                calls.append([part.name, ""])
                ids.append(part.call_id)
            calls[part.index][1] += part.arguments
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [(name, arguments) for name, arguments in calls], ids


def hermes(calls: Sequence[tuple[str, Any]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(of)}}}\n</tool_call>'
        for name, of in calls
    )


def llama3_json(calls: Sequence[tuple[str, Any]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {json.dumps(of)}}}' for name, of in calls)


def mistral(calls: Sequence[tuple[str, Any]]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": of} for n, of in calls])


def mistral_11(calls: Sequence[tuple[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(of)}" for name, of in calls)


def kimi_k2(calls: Sequence[tuple[str, Any]]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(of)}<|tool_call_end|>"
        for number, (name, of) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def deepseek_v3(calls: Sequence[tuple[str, Any]]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(of)}\n```"
        "<｜tool▁call▁end｜>"
        for name, of in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[tuple[str, Any]]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(of)}<｜tool▁call▁end｜>"
        for name, of in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def pythonic(calls: Sequence[tuple[str, Any]]) -> str:
    written = (f"{n}({', '.join(f'{k}={v!r}' for k, v in of.items())})" for n, of in calls)
    return f"[{', '.join(written)}]"


WRITERS = {
    "hermes": (hermes,),
    "llama3_json": (llama3_json,),
    "mistral": (mistral, mistral_11),
    "kimi_k2": (kimi_k2,),
    "deepseek_v3": (deepseek_v3, deepseek_v31),
    "pythonic": (pythonic,),
}
CASES = [(name, write) for name, writers in WRITERS.items() for write in writers]


def test_the_parameter_names_every_format() -> None:
    assert ("auto", *sorted(FORMATS)) == TOOL_CALL_PARSERS


@pytest.mark.parametrize(("name", "write"), CASES)
def test_each_format_is_parsed_as_it_is_written(name: str, write: Any) -> None:
    calls = [WEATHER, ADD, ("files.read", {})]
    text, found, ids = parsed(FORMATS[name], write(calls))
    assert text == ""
    assert [(called, json.loads(of)) for called, of in found] == calls
    if name == "kimi_k2":
        assert ids == ["functions.get_weather:0", "functions.add:1", "functions.files.read:2"]
    else:
        assert ids == ["get_weather-0", "add-1", "files.read-2"]


@pytest.mark.parametrize(("name", "write"), CASES)
def test_text_before_a_call_is_kept_where_the_format_allows_it(name: str, write: Any) -> None:
    if FORMATS[name].opens_answer:  # such an answer is either text or calls
        answer = "I call: " + write([ADD])
        assert parsed(FORMATS[name], answer)[:2] == (answer, [])
        return
    text, found, _ = parsed(FORMATS[name], "I'll look.\n\n" + write([ADD]))
    assert text == "I'll look." and len(found) == 1


@pytest.mark.parametrize(("name", "write"), CASES)
def test_with_one_call_allowed_further_calls_are_dropped(name: str, write: Any) -> None:
    text, found, _ = parsed(FORMATS[name], write([ADD, WEATHER]), calls_max=1)
    assert text == "" and [called for called, _ in found] == ["add"]


@pytest.mark.parametrize(("name", "write"), CASES)
def test_a_broken_off_call_has_the_begin_of_its_arguments(name: str, write: Any) -> None:
    whole = write([ADD])
    at = whole.index("2.5")
    text, found, _ = parsed(FORMATS[name], whole[:at])
    if name == "pythonic":  # an expression of Python is converted when it is complete
        assert (text, found) == (whole[:at], [])
    else:
        assert text == "" and found == [("add", '{"a": 1, "b": ')]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", "a < b, <tool_ and <tool_call"),
        ("hermes", "<tool_call>no JSON</tool_call> after"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '{"name": "add", "arguments": {}}'),
        ("llama3_json", '{"city": "Paris", "list": [1, {"a": 2}]}'),
        ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}, he said'),
        ("llama3_json", "one; two; three"),
        ("llama3_json", '[{"name": "Bob"}]'),
        ("mistral", "x [TOOL_CALLS] [ ]"),
        ("kimi_k2", "<|tool_call_begin|>" + "x" * 600),
        ("deepseek_v3", "a ``` b ```json\n{}\n``` "),
        ("pythonic", "[It's here] and [there]"),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[add(a=open('x'))]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[add(a={1, 2})]"),
        ("pythonic", '[add(a=b"x")]'),
        ("pythonic", "[add(a=1e999)]"),
        ("pythonic", '[add(a="\\ud800")]'),
        ("pythonic", '[add(a=1, **{"b": 2})]'),
        ("pythonic", "[" + "\n" * 600),
        ("llama3_json", '{"name": "add", "age": 3}'),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]{}"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ],
)
def test_what_is_no_call_is_text_of_the_answer(name: str, answer: str) -> None:
    assert parsed(FORMATS[name], answer)[:2] == (answer, [])


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ("add", '{"a": 1}')),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', ("add", '{"a": 1}')),
        ('<tool_call>{"name": "add"}</tool_call>', ("add", "{}")),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', ("add", "{}")),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', ("add", '{"a": 1}')),
        ('<tool_call>{"id": 7, "name": "ad\\u0064", "arguments": {}}', ("add", "{}")),
        ('<tool_call>{"name": "add", "arguments": {}}}\n</tool_call>', ("add", "{}")),
    ],
)
def test_calls_are_read_with_keys_in_any_order_and_small_mistakes(
    answer: str, call: tuple[str, str]
) -> None:
    assert parsed(FORMATS["hermes"], answer)[:2] == ("", [call])


def random_answer(rng: random.Random, name: str) -> str:
    """An answer with calls, text, marks of the format and brackets in any order."""
    written = FORMATS[name]
    pieces: list[str] = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.randrange(4)
        if kind == 0:
            chosen = rng.choices([WEATHER, ADD, ("nobody", {"x": "é"})], k=rng.randint(1, 2))
            pieces.append(rng.choice(WRITERS[name])(chosen))
        elif kind == 1:
            pieces.append(rng.choice(["text", " ", "\n\n", "é漢", "a; b", "```", "<"]))
        elif kind == 2:
            pieces.append(rng.choice([*written.marks, *written.around_name, "x"]))
        else:
            pieces.append(rng.choice(['{"name": "add"', "[", "{", "}", "]", '"', "\\", ",", "("]))
    return "".join(pieces)


def test_random_cuts_change_neither_text_nor_calls(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(10_000):
        name = rng.choice(list(FORMATS))
        answer = random_answer(rng, name)
        cuts = sorted(rng.sample(range(len(answer) + 1), rng.randint(0, min(8, len(answer)))))
        if number % 8 == 0:
            cuts = list(range(1, len(answer)))
        calls_max = rng.choice([None, None, 1])
        whole = parsed(FORMATS[name], answer, (), calls_max)
        assert parsed(FORMATS[name], answer, cuts, calls_max) == whole, (name, answer, cuts)


def test_a_forced_list_is_read_as_calls() -> None:
    answer = '[{"name": "add", "parameters": {"a": 1}}, {"name": "files.read", "parameters": {}}]'
    assert parsed(FORCED, answer)[:2] == ("", [("add", '{"a": 1}'), ("files.read", "{}")])
    assert parsed(FORCED, answer[:38])[1] == [("add", '{"a": 1')]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),  # it gets a description of the tools in this form
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}<|tool_calls_section_begin|>{% endif %}", "kimi_k2"),
        ("{% if tools %}<｜tool▁calls▁begin｜>{% endif %}", "deepseek_v3"),
        ("{% if tools %}<|python_start|>{% endif %}", "pythonic"),
        ('{% if tools %}"parameters": dictionary of argument name{% endif %}', "llama3_json"),
        ("{% if tools %}<tool_call><arg_key>{% endif %}", ""),  # GLM's XML
        ("{% if tools %}<tool_call><function=f>{% endif %}", ""),  # Qwen3-Coder's XML
        ("{% if tools %}{{ tools }}{% endif %}", ""),
    ],
)
def test_the_chat_template_decides_the_format(template: str, name: str) -> None:
    found = format_of(template)
    assert (found.name if found else "") == name


FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '|' }}{% endfor %}"


def test_a_template_without_tools_gets_them_in_hermes_form() -> None:
    tokenizer = Tokenizer(byte_level(), {"chat_template": CHATML})
    system = {"role": "system", "content": "Be brief."}
    prompt = tokenizer.apply_chat([system, *TALK], [FUNCTION])
    assert prompt.startswith("<system>Be brief.\n\n# Tools")
    assert f"<tools>\n{json.dumps(FUNCTION)}\n</tools>" in prompt
    assert prompt.endswith(
        '<user>1 + 1?|<assistant><tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>|'
        "<user><tool_response>\n2\n</tool_response>|"
    )


def test_a_template_with_tools_gets_the_messages_as_they_are() -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    prompt = Tokenizer(byte_level(), {"chat_template": template}).apply_chat(TALK, [FUNCTION])
    assert prompt == f'{json.dumps([FUNCTION])}<user>1 + 1?<assistant>{{"a": 1}}<tool>2c1'


def test_a_template_that_joins_text_gets_arguments_as_text() -> None:
    template = (  # as DeepSeek V3's does
        "{% if tools %}T{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '```json\n' + c['function']['arguments'] }}{% endfor %}{% endfor %}"
    )
    prompt = Tokenizer(byte_level(), {"chat_template": template}).apply_chat(TALK, [FUNCTION])
    assert prompt == 'T```json\n{"a": 1}'


def test_the_template_named_tool_use_serves_chats_with_tools() -> None:
    written = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    tokenizer = Tokenizer(byte_level(), {"chat_template": written})
    assert tokenizer.apply_chat(TALK[:1]) == "plain"
    assert tokenizer.apply_chat(TALK[:1], [FUNCTION]) == "add"


@pytest.mark.parametrize("end", ["", " ", "\n"])
def test_a_continued_message_has_no_end_in_the_prompt(end: str) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    begun = [*TALK[:1], {"role": "assistant", "content": "The sum is" + end}]
    prompt = tokenizer.apply_chat(begun, options={"continue_final_message": True})
    assert prompt == "<user>1 + 1?</s><assistant>The sum is" + end
    assert tokenizer.apply_chat(TALK[:1], options={"add_generation_prompt": False}).endswith("</s>")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({}, "tools is not a list"),
        ([1], "tools[0] is not an object"),
        ([{"type": "web_search"}], "tools[0].type is not supported"),
        ([{"type": "function", "name": "f"}], "tools[0].function is not an object"),
        ([{"function": {"name": "a b"}}], "tools[0].function.name must be"),
        ([{"function": {"name": "f", "strict": 1}}], "tools[0].function.strict is not"),
        ([{"function": {"name": "f", "x": 1}}], "tools[0].function.x is unknown"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters is not"),
        ([{"function": {"name": "f", "parameters": {"type": "string"}}}], "of type object"),
        ([FUNCTION, FUNCTION], "tools[1].function.name is 'add' for the second time"),
    ],
)
def test_a_wrong_function_is_refused_with_the_path_of_its_field(
    value: object, problem: str
) -> None:
    found, told = read_functions("tools", value)
    assert found is None and problem in told


def test_arguments_of_an_earlier_call_become_an_object_if_they_are_one() -> None:
    def read(arguments: object) -> Any:
        function = {"name": "f", "arguments": arguments}
        found, problem = read_calls("calls", [{"id": "1", "function": function}])
        return problem or (found or [{}])[0]["function"]["arguments"]

    assert read('{"a": 1}') == {"a": 1} == read({"a": 1})
    assert read('{"a": ') == '{"a": ' and read("") == {} == read(None) and read("[1]") == "[1]"
    assert read(3) == "calls[0].function.arguments is not a string"


def test_an_opening_after_a_failed_one_still_opens_a_call() -> None:
    answer = '<tool_call>\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert parsed(FORMATS["hermes"], answer)[1] == [("add", "{}")]
    answer = "[TOOL_CALLS] is a mark. [TOOL_CALLS]add[ARGS]{}"
    assert parsed(FORMATS["mistral"], answer)[1] == [("add", "{}")]


def test_the_cut_off_end_of_a_list_of_calls_is_no_text() -> None:
    answer = '[{"name": "add", "parameters": {}}, {"na'
    assert parsed(FORCED, answer)[:2] == ("", [("add", "{}")])


@pytest.mark.parametrize("text", ["e", "im", "|", "", "<|im_end|>"])
def test_a_continued_message_ends_with_its_own_text(text: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    begun = [*TALK[:1], {"role": "assistant", "content": text}]
    prompt = tokenizer.apply_chat(begun, options={"continue_final_message": True})
    assert prompt == f"<|im_start|>user\n1 + 1?<|im_end|><|im_start|>assistant\n{text}"


def test_results_of_several_calls_are_one_message_where_roles_alternate() -> None:
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    results = [{"role": "tool", "content": text, "tool_call_id": "c1"} for text in "23"]
    prompt = tokenizer.apply_chat([*TALK[:2], *results, {"role": "user", "content": "so?"}])
    assert prompt.endswith(
        "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\nso?"
    )


def test_a_template_that_prints_arguments_gets_them_as_text() -> None:
    template = (
        "{% if tools %}T{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    assert tokenizer.apply_chat(TALK, [FUNCTION]) == 'T{"a": 1}'
