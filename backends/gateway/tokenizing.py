"""The conductor's tokenizer for /tokenize and logprobs: prompts to token ids, tokens to text.

The tokenizer is loaded at the first call, and again when another checkpoint is served. Callers use
other threads than the event loop's, because a long text would stall the loop's streams.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from backends.config_pbtxt import checkpoint_folder
from backends.errors import ConfigError, InvalidRequest
from backends.gateway.frontend_calls import ServedModel
from backends.gateway.request.fields import bad_field
from backends.gateway.request.prompts import TokenizeRequest
from backends.gateway.request.tool_use import model_format
from backends.statuses import HttpRefusal
from backends.text.chat_template import CONTINUE
from backends.text.guides import is_installed
from backends.text.reasoning import NONE, Thinking, marks_of, opened_by
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer
from backends.text.tool_calls.formats import ToolCallFormat

OPTIONS_BYTES_MAX = 1024  # longer ones are read anew for each request
THINKING_MAX = 64  # sets of template variables for which it is known how the model thinks


class ServedWords:
    """The bytes that each token of a vocabulary adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The first call for a tokenizer is slow, because it reads the vocabulary."""
        self._tokenizer, self._token_bytes = tokenizer, tokenizer.token_bytes

    def of(self, context_ids: list[int], token_id: int) -> bytes:
        found = self._token_bytes
        if not found.has_text(token_id):
            return self._tokenizer.decode([token_id], skip_special=False).encode()
        context = [each for each in context_ids[-2 * CONTEXT_TOKENS :] if found.has_text(each)]
        return found.of(context[-CONTEXT_TOKENS:], token_id)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls."""

    written: ToolCallFormat | None  # None: unknown
    has_hidden_marks: bool  # its marks are special tokens, which answers have on request only
    guided: ToolCallFormat | None = None  # `written`, if there is a package to guide with


@dataclass(frozen=True, slots=True)
class ServedThinking:
    """How the answers to some prompts of a model think."""

    thinking: Thinking | None  # None: they do not
    has_hidden_marks: bool = False  # as of CallFormat


def _hides(tokenizer: Tokenizer, marks: Sequence[str]) -> bool:
    """Whether an answer has some of these marks on request only, because they are special."""
    return any(tokenizer.decode(tokenizer.encode(mark, False)) != mark for mark in marks)


class Tokenizing:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[str, Tokenizer] | None = None
        self._formats: dict[ServedModel, CallFormat] = {}  # of the model served last
        self._thinking: dict[tuple[ServedModel, bytes], ServedThinking] = {}

    def token_ids(self, checkpoint: str, request: TokenizeRequest) -> list[int]:
        tokenizer = self._tokenizer(checkpoint)
        is_chat = bool(request.messages)
        try:
            text = request.prompt
            if is_chat:
                text = tokenizer.apply_chat(
                    request.messages, request.tools, request.template_options
                )
            return tokenizer.encode(text, add_special=request.adds_special)
        except InvalidRequest as error:
            name = "messages" if is_chat else "prompt"
            raise bad_field(name, str(error)) from None

    def text(self, checkpoint: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises HttpRefusal 400 for an id outside
        the vocabulary."""
        tokenizer = self._tokenizer(checkpoint)
        for index, token_id in enumerate(token_ids):
            if token_id >= tokenizer.vocabulary_tokens:
                known = f"send 0 to {tokenizer.vocabulary_tokens - 1}"
                raise bad_field("tokens", f"tokens[{index}] is {token_id}; {known}")
        return tokenizer.decode(token_ids, skip_special=False)

    def known_format(self, served: ServedModel) -> CallFormat | None:
        """The result of an earlier `call_format` for this model; fast."""
        return self._formats.get(served)

    def call_format(self, served: ServedModel) -> CallFormat:
        """How the served model writes tool calls."""
        self._formats = {served: self._call_format(served)}
        return self._formats[served]

    def _call_format(self, served: ServedModel) -> CallFormat:
        tokenizer = self._tokenizer(served.checkpoint)
        try:
            found = model_format(served.tool_call_parser, tokenizer.chat_source(has_tools=True))
        except InvalidRequest:
            return CallFormat(None, False)  # the conductor reports the missing template
        marks = found.marks if found is not None else ()
        return CallFormat(found, _hides(tokenizer, marks), found if is_installed() else None)

    def known_thinking(self, served: ServedModel, options: bytes) -> ServedThinking | None:
        """The result of an earlier `thinking` with these options; fast."""
        return self._thinking.get((served, options))

    def thinking(self, served: ServedModel, options: bytes) -> ServedThinking:
        """How the model answers a chat. `options`: JSON of the template's variables; b"": none."""
        found = self._thought(served, options)
        if len(options) <= OPTIONS_BYTES_MAX:
            if len(self._thinking) >= THINKING_MAX:
                self._thinking = {}
            self._thinking[served, options] = found
        return found

    def _thought(self, served: ServedModel, options: bytes) -> ServedThinking:
        if served.reasoning_parser == NONE:
            return ServedThinking(None)
        tokenizer = self._tokenizer(served.checkpoint)
        try:
            marks = marks_of(served.reasoning_parser, tokenizer.chat_source())
            if marks is None:
                return ServedThinking(None)
            given = msgspec.json.decode(options) if options else {}
            hides = _hides(tokenizer, marks[:2])
            if given.get(CONTINUE):  # the message that the answer continues may have thoughts
                return ServedThinking(Thinking(marks, False), hides)
            prompt = tokenizer.apply_chat([{"role": "user", "content": "x"}], (), given)
        except InvalidRequest:
            return ServedThinking(None)  # the conductor reports the error
        return ServedThinking(opened_by(prompt, marks), hides)

    def words(self, checkpoint: str) -> ServedWords:
        return ServedWords(self._tokenizer(checkpoint))

    def _tokenizer(self, checkpoint: str) -> Tokenizer:
        with self._lock:
            if self._held is None or self._held[0] != checkpoint:
                repository = os.environ.get("MOONCAKE_REPOSITORY", ".")
                try:
                    tokenizer = Tokenizer.load(checkpoint_folder(checkpoint, repository))
                except ConfigError as error:
                    raise HttpRefusal(500, "internal_error", str(error)) from None
                self._held = (checkpoint, tokenizer)
            return self._held[1]
