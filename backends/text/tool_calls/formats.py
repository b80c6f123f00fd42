"""The formats in which models write tool calls, in one table.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3_json   {"name": "f", "parameters": {...}}; {...}
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
                  [TOOL_CALLS]f[ARGS]{...}
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
                  <|tool_call_end|>
    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```
                  <｜tool▁call▁end｜>
                  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    pythonic      [f(a=1, b="x"), g()]

hermes is Qwen's format too. The second form of mistral is that of tokenizer v11 and later, the
second form of deepseek_v3 that of DeepSeek V3.1. Llama 3 and 4 write pythonic if a prompt asks for
it; their chat templates ask for llama3_json.

A call has one of three forms. OBJECT: one JSON object with the name and the arguments. HEADER: a
name before the JSON of the arguments. PYTHON: an expression of Python. Pure. Not here: parsing an
answer (parser.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Form(enum.Enum):
    OBJECT = "object"
    HEADER = "header"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes its calls."""

    name: str
    form: Form
    openings: tuple[str, ...]  # texts that open a call, or a list of calls
    # True: an answer that begins with a bracket is a call too, if it names a known function.
    opens_answer: bool = False
    before: tuple[str, ...] = ()  # texts before calls that are not part of the answer
    after: tuple[str, ...] = ()  # texts after a call that are not part of the answer
    # Texts around the object of a call that a grammar can force. (): a call may begin without a
    # mark, or is not one object between two marks.
    guided: tuple[str, ...] = ()
    around_name: tuple[str, ...] = ()  # HEADER: texts before the arguments that are not the name
    template_marks: tuple[str, ...] = ()  # texts of chat templates of models that write this format
    id_prefix: str = "call_"
    id_characters: int = 24  # random characters of a call's id, after the prefix
    has_ids: bool = False  # a call's id is functions.NAME:INDEX, as the model writes it

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that are not part of an answer."""
        return (*self.openings, *self.before, *self.after)


FORMATS: Mapping[str, ToolCallFormat] = {
    each.name: each
    for each in (
        ToolCallFormat(
            "kimi_k2",
            Form.HEADER,
            ("<|tool_call_begin|>",),
            before=("<|tool_calls_section_begin|>",),
            after=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            around_name=("<|tool_call_argument_begin|>",),
            template_marks=("<|tool_calls_section_begin|>",),
            has_ids=True,
        ),
        ToolCallFormat(
            "deepseek_v3",
            Form.HEADER,
            ("<｜tool▁call▁begin｜>",),
            before=("<｜tool▁calls▁begin｜>",),
            after=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            around_name=("function<｜tool▁sep｜>", "<｜tool▁sep｜>", "```json"),
            template_marks=("<｜tool▁calls▁begin｜>",),
        ),
        ToolCallFormat(
            "mistral",
            Form.OBJECT,
            ("[TOOL_CALLS]",),
            around_name=("[ARGS]",),
            template_marks=("[TOOL_CALLS]",),
            id_prefix="",
            id_characters=9,
        ),
        ToolCallFormat(
            "llama3_json",
            Form.OBJECT,
            ("<|python_tag|>",),
            opens_answer=True,
            after=(";",),
            template_marks=("<|python_tag|>", '"parameters": dictionary of argument name'),
        ),
        ToolCallFormat(
            "pythonic",
            Form.PYTHON,
            ("<|python_start|>",),
            opens_answer=True,
            after=("<|python_end|>",),
            template_marks=("<|python_start|>",),
        ),
        ToolCallFormat(
            "hermes",
            Form.OBJECT,
            ("<tool_call>",),
            after=("</tool_call>",),
            guided=("<tool_call>\n", "\n</tool_call>"),
            template_marks=("<tool_call>",),
        ),
    )
}
HERMES = FORMATS["hermes"]
# The list of calls that the guide of `required` calls forces (schema.py).
FORCED = ToolCallFormat("forced", Form.OBJECT, (), opens_answer=True)
OTHER_MARKS = ("<function=", "<arg_key>")  # of Qwen3-Coder's and GLM's XML, beside <tool_call>


def format_of(template: str) -> ToolCallFormat | None:
    """The format for which a chat template was made; None if no format of the table is.

    A template without tools gets a description of the tools in Hermes form (prompt.py).
    """
    if not mentions_tools(template):
        return HERMES
    if any(mark in template for mark in OTHER_MARKS):
        return None
    for each in FORMATS.values():
        if any(mark in template for mark in each.template_marks):
            return each
    return None


def mentions_tools(template: str) -> bool:
    return "tools" in template
