"""The bytes that a token adds to the text, as a function of a few tokens before it.

Streaming detokenises one token after the other, so a token's bytes may depend only on a short
context. There are two kinds of tokenizer:

* *byte-level* (GPT-2, Llama 3, Qwen, DeepSeek, the demo): a token is a fixed string of bytes, and a
  character may be spread over several tokens;
* *any other* (SentencePiece with byte fallback or Metaspace, WordPiece): a token's bytes are what
  it adds to the decoded text of the `CONTEXT_TOKENS` tokens before it. Exception: a byte-fallback
  token adds its single byte. The library would decode a run of byte-fallback tokens as a whole, so
  one invalid byte would turn characters that are already streamed into U+FFFD.

Special tokens and ids outside the vocabulary have no text and do not count as context. Streamed
text is equal to that of Tokenizer.decode if all bytes are valid. For invalid bytes of byte-fallback
tokens, Tokenizer.decode has one U+FFFD per byte. Streamed text has one per incomplete character, as
Unicode recommends.

Not here: making characters out of bytes, stop words (text_stream.py).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

CONTEXT_TOKENS = 16  # a token's bytes depend on at most this many tokens with text before it
REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte-fallback token


def token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """The kind of TokenBytes that fits this tokenizer."""
    stages = _stages(json.loads(backend.to_str())["decoder"])
    if set(stages) <= {"ByteLevel", "Fuse"} and "ByteLevel" in stages:
        return ByteLevelTokens(backend)
    return ContextTokens(
        backend, has_byte_tokens="ByteFallback" in stages, splits_characters="ByteLevel" in stages
    )


class TokenBytes(ABC):
    """Thread-safe, because only caches change after the construction."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # Try which tokens `decode` skips, because it also skips some that are not flagged special.
        self._special_ids = {
            token_id
            for token_id in backend.get_added_tokens_decoder()
            if not backend.decode([token_id], skip_special_tokens=True)
            and backend.decode([token_id], skip_special_tokens=False)
        }
        self._token_by_id: dict[int, str | None] = {}

    @abstractmethod
    def of(self, context_ids: Sequence[int], token_id: int) -> bytes:
        """The bytes of a token after `context_ids`. The token and its context have text."""

    def ending(self, context_ids: Sequence[int]) -> bytes:
        """The bytes that `of` held back; they are added at the end of the output."""
        return b""

    def has_text(self, token_id: int) -> bool:
        """False for a special token, and for an id outside the vocabulary."""
        return self.token(token_id) is not None

    def token(self, token_id: int) -> str | None:
        """The string of a token; None for a token without text."""
        try:
            return self._token_by_id[token_id]
        except KeyError:
            is_known = token_id >= 0 and token_id not in self._special_ids
            token = self._backend.id_to_token(token_id) if is_known else None
            self._token_by_id[token_id] = token
            return token


class ByteLevelTokens(TokenBytes):
    """Tokens of a byte-level tokenizer: each character of a token stands for one byte."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self._byte_of = _byte_of_character()
        self._bytes_by_id: dict[int, bytes] = {}

    def of(self, context_ids: Sequence[int], token_id: int) -> bytes:
        try:
            return self._bytes_by_id[token_id]
        except KeyError:
            token = self.token(token_id) or ""
            values = [self._byte_of.get(character, -1) for character in token]
            # An added token ("<think> ") is plain text, and not written in the byte alphabet.
            found = token.encode() if -1 in values else bytes(values)
            self._bytes_by_id[token_id] = found
            return found


class ContextTokens(TokenBytes):
    """Tokens of any other tokenizer: a token's bytes are what it adds to the decoded text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, has_byte_tokens: bool, splits_characters: bool
    ) -> None:
        super().__init__(backend)
        self._has_byte_tokens = has_byte_tokens
        # If the decoder has a byte-level step, several tokens may make one character. Before the
        # last of them, the decoded text ends with U+FFFD.
        self._splits_characters = splits_characters

    def of(self, context_ids: Sequence[int], token_id: int) -> bytes:
        if self._has_byte_tokens and (found := BYTE_TOKEN.fullmatch(self.token(token_id) or "")):
            return bytes([int(found[1], 16)])
        context = list(context_ids[-CONTEXT_TOKENS:])
        before, after = self._settled(context), self._settled([*context, token_id])
        return after[len(before) :].encode("utf-8", "replace")

    def ending(self, context_ids: Sequence[int]) -> bytes:
        context = list(context_ids[-CONTEXT_TOKENS:])
        return self._decode(context)[len(self._settled(context)) :].encode()

    def _settled(self, token_ids: list[int]) -> str:
        """The decoded text without a U+FFFD at the end, which the next token may change."""
        text = self._decode(token_ids)
        return text.rstrip(REPLACEMENT) if self._splits_characters else text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))


def _stages(decoder: Any) -> list[str]:
    """Types of the steps of a decoder, which is an object of tokenizer.json."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [stage for part in decoder["decoders"] for stage in _stages(part)]
    return [decoder["type"]]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet. Printable bytes are themselves, the others are U+0100, U+0101, ..."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (value for value in range(256) if value not in printable)
    found = {chr(value): value for value in printable}
    found |= {chr(0x100 + index): value for index, value in enumerate(others)}
    assert set(found) == set(ByteLevel.alphabet()), "the library's byte alphabet changed"
    return found
