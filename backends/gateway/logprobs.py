"""Logprobs of an answer in OpenAI's formats, from the conductor's tensors. Pure.

A chat has an object for each token; a completion has parallel lists. The text of a token is the
text that it adds to the tokens before it. If a token's bytes are not complete characters, its text
has U+FFFD instead, and its `bytes` has the bytes.
"""

from __future__ import annotations

import codecs
from typing import Any, NamedTuple, Protocol

from backends.gateway.fields import CHAT

LEAST = -9999.0  # OpenAI's value for an impossible token, because JSON has no infinity


class PieceLogprobs(NamedTuple):
    """Logprobs of the tokens of one message. `top_ids`: per position, the likeliest ids first."""

    token_ids: list[int]
    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]


class TokenWords(Protocol):
    def of(self, context_ids: list[int], token_id: int) -> bytes:
        """The bytes that the token adds to the text of `context_ids`; for a special token, its
        name."""
        ...


class LogprobsWriter:
    """Converts the logprobs of one answer, message by message."""

    def __init__(self, route: str, words: TokenWords) -> None:
        self._is_chat = route == CHAT
        self._words = words
        self._context_ids: list[int] = []
        self._text = _TextOffsets()

    def add(self, piece: PieceLogprobs) -> dict[str, Any]:
        """The field `logprobs` of an answer's choice, for these tokens."""
        found: list[dict[str, Any]] = []
        for token_id, log_prob, top_ids, top_log_probs in zip(*piece, strict=True):
            best = [self._named(*each) for each in zip(top_ids, top_log_probs, strict=True)]
            found.append({**self._named(token_id, log_prob), "top_logprobs": best})
            self._context_ids.append(token_id)
        if self._is_chat:
            return {"content": found, "refusal": None}
        return {
            "tokens": [each["token"] for each in found],
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": [
                {best["token"]: best["logprob"] for best in reversed(each["top_logprobs"])}
                for each in found
            ],
            "text_offset": [self._text.add(bytes(each["bytes"])) for each in found],
        }

    def _named(self, token_id: int, log_prob: float) -> dict[str, Any]:
        raw = self._words.of(self._context_ids, token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(log_prob, LEAST),
            "bytes": list(raw),
        }


class _TextOffsets:
    """Computes the offset of each token in the text, in characters."""

    def __init__(self) -> None:
        self._characters = 0  # number of complete or invalid characters so far
        self._begun = b""  # bytes of an incomplete character at the end

    def add(self, raw: bytes) -> int:
        """The offset of the next token, which has these bytes. If several tokens form one
        character, each has the offset of this character."""
        if raw and self._begun and not _goes_on(self._begun, raw):
            self._characters += len(self._begun.decode("utf-8", "replace"))
            self._begun = b""
        offset = self._characters
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters += len(decoder.decode(self._begun + raw))
        self._begun = decoder.getstate()[0]
        return offset


def _goes_on(begun: bytes, raw: bytes) -> bool:
    """True if the first byte of `raw` can continue the character that `begun` begins."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + raw[:1])
    except UnicodeDecodeError:
        return False
    return True


def joined(pieces: list[PieceLogprobs]) -> PieceLogprobs:
    return PieceLogprobs(
        *([each for piece in pieces for each in piece[index]] for index in range(4))
    )
