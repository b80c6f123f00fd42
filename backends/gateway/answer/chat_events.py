"""The bytes of the answers of a chat or completion: server-sent events, or a JSON object. Pure.

A stream has one event for each message of the conductor, often one per token. To save time, the
constant parts of an event are encoded once per answer. The last event with text has the finish
reason. If the client requested token counts, an event with them follows. `[DONE]` ends the stream.

    data: {"id": ..., "object": ..., "created": ..., "model": ..., "choices": [{...}]}

If the model thinks, or the answer may have tool calls, a reader finds them in its text. Then the
thinking, text and the parts of each call have events of their own, and a message whose text is held
back may have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.gateway.answer.logprobs import joined
from backends.gateway.answer.pieces import AnswerPiece, ChoiceWriter, thinking_tokens
from backends.gateway.request.fields import CHAT
from backends.statuses import HttpRefusal
from backends.text.reasoning import Thought
from backends.text.tool_calls.parser import CallPart, Part

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
EVENT_END = b"}\n\n"
REASON = b',"finish_reason":'
# The conductor's finish reason -> OpenAI's.
FINISH_REASONS = {"stop_word": "stop", "end_id": "stop", "length": "length"}
OBJECTS = {
    # route: (object of a stream, object of a whole answer, prefix of their ids)
    "chat": ("chat.completion.chunk", "chat.completion", "chatcmpl-"),
    "completion": ("text_completion", "text_completion", "cmpl-"),
}


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """The facts that all events of an answer contain."""

    route: str
    answer_id: str
    created_s: int
    model: str
    counts_each_event: bool = False  # True: each event has token counts, not only the last
    answers: int = 1  # to each prompt


def usage(
    prompt_tokens: int, output_tokens: int, cached_tokens: int, of_thinking: int | None
) -> dict[str, object]:
    """`of_thinking`: tokens of the output; None if the model does not think."""
    found: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if of_thinking is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": of_thinking}
    return found


class EventStream:
    """The events of all answers of one request, as bytes. `kept`: as in `whole`."""

    def __init__(
        self,
        facts: AnswerFacts,
        includes_usage: bool,
        choices: Sequence[ChoiceWriter],
        kept: int = 1,
    ) -> None:
        self._kept = kept
        self._facts, self._choices = facts, choices
        self._unfinished = len(choices)
        self._includes_usage = includes_usage
        self._output_tokens = 0
        self._of_prompts: dict[int, tuple[int, int]] = {}  # prompt -> its tokens, cached ones
        self._is_chat = facts.route == CHAT
        head = {
            "id": facts.answer_id,
            "object": OBJECTS[facts.route][0],
            "created": facts.created_s,
            "model": facts.model,
        }
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        for index, choice in enumerate(choices):
            choice.before_delta = self._head + b'{"index":%d,"delta":' % index
            text = b'{"index":%d,"text":' % index
            choice.before = (
                choice.before_delta + b'{"content":' if self._is_chat else self._head + text
            )
        closing = b"}" if self._is_chat else b""
        # As in OpenAI's streams, the token counts are null except in the last event.
        no_usage = b',"usage":null' if includes_usage else b""
        self._between = closing + b',"logprobs":null' + REASON
        self._end = b"}]" + no_usage + EVENT_END
        self._counts_each_event = facts.counts_each_event

    @property
    def is_over(self) -> bool:
        return not self._unfinished

    def event(self, piece: AnswerPiece) -> bytes:
        """The events of one piece; b"" if its text is held back. Before the first event of a chat's
        answer comes one with the role."""
        choice = self._choices[piece.index]
        self._output_tokens += piece.output_tokens
        between, end = self._between, self._end
        if choice.logprobs is not None and piece.logprobs is not None:
            logprobs = encode(choice.logprobs.add(piece.logprobs))
            between = between.replace(b"null", logprobs, 1)
        if piece.token_ids is not None:
            between = between.removesuffix(REASON) + b',"token_ids":' + encode(piece.token_ids)
            if piece.prompt_ids:
                choice.prompt_ids = b',"prompt_token_ids":' + encode(piece.prompt_ids)
                between += b"" if self._is_chat else choice.prompt_ids
            between += REASON
        if self._counts_each_event or piece.finish_reason:
            of_prompt = (piece.prompt_tokens, piece.cached_tokens)
            self._of_prompts.setdefault(piece.index // self._facts.answers, of_prompt)
        if self._counts_each_event:
            end = b'}],"usage":' + self._usage() + EVENT_END
        if piece.decision:
            end = end.removesuffix(EVENT_END) + b',"decision":' + piece.decision + EVENT_END
        if choice.reader is not None:
            body = self._with_parts(choice, piece, between, end)
        else:
            reason = encode(_reason(piece)) if piece.finish_reason else b"null"
            text = encode(piece.text.decode("utf-8", "replace"))
            body = choice.before + text + between + reason + end
        if body and not choice.is_begun:
            choice.is_begun = True
            if self._is_chat:
                role = choice.before_delta + b'{"role":"assistant","content":""' + self._between
                end = self._end.removesuffix(EVENT_END) + choice.prompt_ids + EVENT_END
                body = role + b"null" + end + body
        if piece.finish_reason:
            self._unfinished -= 1
            if self.is_over:
                body += self._closing()
        return body

    def _with_parts(
        self, choice: ChoiceWriter, piece: AnswerPiece, between: bytes, end: bytes
    ) -> bytes:
        """The events of a piece in a chat with thinking or tools. Logprobs, counts and the decision
        are in its last event."""
        plain = self._between + b"null" + self._end
        deltas = []
        for part in choice.push(piece):
            choice.has_calls |= isinstance(part, CallPart)
            deltas.append(_delta(part))
        has_more = between is not self._between or end is not self._end
        if piece.finish_reason or (has_more and not deltas):
            deltas.append(b'{"content":""' if not choice.has_calls else b"{")
        if not deltas:
            return b""
        begin = choice.before_delta
        body = b"".join(begin + delta + plain for delta in deltas[:-1]) + begin + deltas[-1]
        reason = encode(_reason(piece, choice.has_calls)) if piece.finish_reason else b"null"
        return body + between + reason + end

    def _usage(self) -> bytes:
        prompt_tokens, cached_tokens = map(sum, zip(*self._of_prompts.values(), strict=True))
        thinking = thinking_tokens(self._choices)
        return encode(usage(prompt_tokens, self._output_tokens, cached_tokens, thinking))

    def _closing(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage() + EVENT_END + DONE

    def whole(self, pieces: Sequence[AnswerPiece]) -> bytes:
        return whole(self._facts, pieces, self._choices, self._kept)

    def error(self, refusal: HttpRefusal) -> bytes:
        """The event for an error after the first event of a stream."""
        return b"data: " + encode(refusal.body()) + b"\n\n"


def _reason(piece: AnswerPiece, has_calls: bool = False) -> str:
    """OpenAI's finish reason of an answer that ends with this piece."""
    reason = FINISH_REASONS.get(piece.finish_reason, piece.finish_reason)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _delta(part: Thought | Part) -> bytes:
    """A `delta` without its closing bracket."""
    if isinstance(part, Thought):
        return b'{"reasoning_content":' + encode(part.text)
    if isinstance(part, str):
        return b'{"content":' + encode(part)
    call: dict[str, object] = {"index": part.index}
    function = {"arguments": part.arguments}
    if part.name:
        call |= {"id": part.call_id, "type": "function"}
        function = {"name": part.name, **function}
    return b'{"tool_calls":' + encode([{**call, "function": function}])


def _of_parts(parts: Sequence[Thought | Part]) -> dict[str, object]:
    """`content`, `reasoning_content` and `tool_calls` of a whole answer; `content` is None if it
    has only calls."""
    found: dict[str, object] = {}
    thoughts = [part.text for part in parts if isinstance(part, Thought)]
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    text = "".join(part for part in parts if isinstance(part, str))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, CallPart):
            continue
        if part.name:
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += part.arguments
    if calls:
        return found | {"content": text or None, "tool_calls": calls}
    return found | {"content": text}


def whole(
    facts: AnswerFacts, pieces: Sequence[AnswerPiece], choices: Sequence[ChoiceWriter], kept: int
) -> bytes:
    """All answers of a request that is not streamed. `kept`: answers to each prompt that the client
    gets, those with the highest mean logprob."""
    of_choices: list[list[AnswerPiece]] = [[] for _ in choices]
    for piece in pieces:
        of_choices[piece.index].append(piece)
    made: list[dict[str, object]] = []
    for begin in range(0, len(choices), facts.answers):
        of_prompt = range(begin, begin + facts.answers)
        if kept < facts.answers:
            of_prompt = sorted(of_prompt, key=lambda index: -_mean_logprob(of_choices[index]))[
                :kept
            ]
        for index in of_prompt:
            made.append(_choice(facts, len(made), of_choices[index], choices[index]))
    firsts = [of_choices[begin][-1] for begin in range(0, len(choices), facts.answers)]
    answer = {
        "id": facts.answer_id,
        "object": OBJECTS[facts.route][1],
        "created": facts.created_s,
        "model": facts.model,
        "choices": made,
        "usage": usage(
            sum(piece.prompt_tokens for piece in firsts),
            sum(piece.output_tokens for piece in pieces),
            sum(piece.cached_tokens for piece in firsts),
            thinking_tokens(choices),
        ),
    }
    if facts.route == CHAT:
        answer |= _of_prompt(of_choices[0][0])
    if decision := of_choices[0][-1].decision:
        answer["decision"] = msgspec.Raw(decision)
    return encode(answer)


def _of_prompt(first: AnswerPiece) -> dict[str, object]:
    """The fields about the prompt: of a chat, or of a choice of a completion."""
    found: dict[str, object] = {}
    if first.prompt_logprobs:
        found["prompt_logprobs"] = msgspec.Raw(first.prompt_logprobs)
    if first.prompt_ids is not None:
        found["prompt_token_ids"] = first.prompt_ids
    return found


def _choice(
    facts: AnswerFacts, index: int, pieces: list[AnswerPiece], writer: ChoiceWriter
) -> dict[str, object]:
    of_tokens = None
    if writer.logprobs is not None:
        of_tokens = writer.logprobs.add(joined([each.logprobs for each in pieces if each.logprobs]))
    text = b"".join(piece.text for piece in pieces).decode("utf-8", "replace")
    choice: dict[str, object] = {"index": index}
    if facts.route == CHAT:
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if writer.reader is not None:
            message |= _of_parts([part for piece in pieces for part in writer.push(piece)])
        choice["message"] = message
    else:
        choice["text"] = text
        choice |= _of_prompt(pieces[0])
    if pieces[-1].token_ids is not None:
        choice["token_ids"] = [each for piece in pieces for each in piece.token_ids or ()]
    has_calls = writer.reader is not None and "tool_calls" in message
    return choice | {"logprobs": of_tokens, "finish_reason": _reason(pieces[-1], has_calls)}


def _mean_logprob(pieces: Sequence[AnswerPiece]) -> float:
    found = joined([each.logprobs for each in pieces if each.logprobs]).log_probs
    return sum(found) / len(found) if found else float("-inf")
