"""Prompts as token ids, by the tokenizer that the conductor uses: for /tokenize.

The tokenizer is read when somebody asks first, and again when another checkpoint is served. For
several threads: a long text takes a while, which the event loop must not wait for.
"""

from __future__ import annotations

import os
import threading

from backends.config_pbtxt import checkpoint_folder
from backends.errors import ConfigError, InvalidRequest
from backends.gateway.fields import bad_field
from backends.gateway.prompts import TokenizeRequest
from backends.statuses import HttpRefusal
from backends.text.tokenizer import Tokenizer


class Tokenizing:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[str, Tokenizer] | None = None

    def token_ids(self, checkpoint: str, asked: TokenizeRequest) -> list[int]:
        tokenizer = self._tokenizer(checkpoint)
        is_chat = bool(asked.messages)
        try:
            text = tokenizer.apply_chat(asked.messages) if is_chat else asked.prompt
            return tokenizer.encode(text, add_special=asked.adds_special and not is_chat)
        except InvalidRequest as error:
            name = "messages" if is_chat else "prompt"
            raise bad_field(name, str(error)) from None

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
