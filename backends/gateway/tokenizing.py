"""The conductor's tokenizer for /tokenize and logprobs: prompts to token ids, tokens to text.

The tokenizer is loaded at the first call, and again when another checkpoint is served. Callers use
other threads than the event loop's, because a long text would stall the loop's streams.
"""

from __future__ import annotations

import os
import threading

from backends.config_pbtxt import checkpoint_folder
from backends.errors import ConfigError, InvalidRequest
from backends.gateway.fields import bad_field
from backends.gateway.prompts import TokenizeRequest
from backends.statuses import HttpRefusal
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer


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


class Tokenizing:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[str, Tokenizer] | None = None

    def token_ids(self, checkpoint: str, request: TokenizeRequest) -> list[int]:
        tokenizer = self._tokenizer(checkpoint)
        is_chat = bool(request.messages)
        try:
            text = tokenizer.apply_chat(request.messages) if is_chat else request.prompt
            return tokenizer.encode(text, add_special=request.adds_special and not is_chat)
        except InvalidRequest as error:
            name = "messages" if is_chat else "prompt"
            raise bad_field(name, str(error)) from None

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
