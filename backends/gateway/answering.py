"""Starts the answer to a checked request: what the served model adds to it, and the call.

The model decides how an answer is read: how it thinks, and how it writes tool calls. If its marks
are special tokens, the request asks for them in the text. Another thread loads the tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from backends.gateway.answer.logprobs import LogprobsWriter, PromptWriter
from backends.gateway.answer.pieces import ChoiceWriter
from backends.gateway.frontend_calls import FrontendCall, FrontendCalls, ServedModel, SeveralCalls
from backends.gateway.request.fields import CHAT
from backends.gateway.request.infer_request import GatewayRequest
from backends.gateway.request.tool_use import DEFAULT
from backends.gateway.tokenizing import ServedWords, Tokenizing
from backends.text.reasoning import Thinking, ThinkingReader
from backends.text.tool_calls.formats import ToolCallFormat


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    request: GatewayRequest  # with all that the model adds
    call: FrontendCall | SeveralCalls
    choices: Sequence[ChoiceWriter]  # for each answer


async def start_answer(
    wanted: GatewayRequest,
    answer_id: str,
    served: ServedModel,
    calls: FrontendCalls,
    tokenizing: Tokenizing,
) -> StartedAnswer:
    """Raises HttpRefusal."""
    written = thinking = words = None
    if wanted.calls_tools:
        wanted, written = await _with_calls(wanted, served, tokenizing)
    if wanted.route == CHAT:
        wanted, thinking = await _with_thinking(wanted, served, tokenizing)
    if wanted.shows_logprobs or wanted.prompt is not None:
        words = await asyncio.to_thread(tokenizing.words, served.checkpoint)
    choices = [_choice(wanted, written, thinking, words) for _ in range(wanted.choices)]
    of_prompts: list[PromptWriter] = []
    if words is not None and wanted.prompt is not None:
        for index, choice in enumerate(choices):
            asked = wanted.prompts[index // wanted.answers]
            of_prompts.append(PromptWriter(wanted.prompt, asked, words, choice.logprobs))
    return StartedAnswer(wanted, calls.start(wanted, answer_id, of_prompts), choices)


async def _with_calls(
    wanted: GatewayRequest, served: ServedModel, tokenizing: Tokenizing
) -> tuple[GatewayRequest, ToolCallFormat | None]:
    """The request, and the format in which the model writes calls."""
    assert wanted.tools is not None
    found = tokenizing.known_format(served)
    if found is None:
        found = await asyncio.to_thread(tokenizing.call_format, served)
    if found.has_hidden_marks and wanted.tools.choice == DEFAULT:
        wanted = wanted.with_inputs(skip_special_tokens=False)
    return wanted.of_form(wanted.tools.strict_form(found.guided)), found.written


async def _with_thinking(
    wanted: GatewayRequest, served: ServedModel, tokenizing: Tokenizing
) -> tuple[GatewayRequest, Thinking | None]:
    """The request, and how its answers think."""
    options = wanted.prompts[0].get("chat_template_kwargs", b"")
    found = tokenizing.known_thinking(served, options)
    if found is None:
        found = await asyncio.to_thread(tokenizing.thinking, served, options)
    if (thinking := found.thinking) is None:
        return wanted, None
    # A message for each token, because the tokens of the thinking are counted.
    wanted = wanted.with_inputs(stream=True)
    if found.has_hidden_marks:
        wanted = wanted.with_inputs(skip_special_tokens=False)
    if wanted.form is not None:
        begin = "" if thinking.is_open else thinking.marks.begin
        wanted = wanted.of_form(wanted.form.after_thinking(begin, thinking.marks.end))
    return wanted, thinking


def _choice(
    wanted: GatewayRequest,
    written: ToolCallFormat | None,
    thinking: Thinking | None,
    words: ServedWords | None,
) -> ChoiceWriter:
    logprobs = LogprobsWriter(wanted.route, words) if words and wanted.shows_logprobs else None
    calls = wanted.tools.reader(written) if wanted.tools and wanted.calls_tools else None
    reader = calls if thinking is None else ThinkingReader(thinking, calls)
    return ChoiceWriter(logprobs, reader)
