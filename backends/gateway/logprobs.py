"""Logprobs of an answer in OpenAI's shapes, from the conductor's tensors. Pure.

A chat has an object for each token, a completion lists beside each other. The text of a token is
what it adds behind those before it; bytes that are no character by themselves are shown as U+FFFD,
and as they are in `bytes`.

Not here: what the numbers are of (backends/token_logprobs.py), reading tensors (frontend_calls.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from backends.gateway.fields import CHAT

LEAST = -9999.0  # OpenAI's word for a token that cannot be: JSON has no infinity


class PieceLogprobs(NamedTuple):
    """Of the tokens of one message; the best ones of each are best first."""

    token_ids: list[int]
    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]


class TokenWords(Protocol):
    def of(self, context_ids: list[int], token_id: int) -> bytes:
        """What the token adds to the text; of a special one, its name."""
        ...


class LogprobsWriter:
    """Of one answer, message by message."""

    def __init__(self, route: str, words: TokenWords) -> None:
        self._is_chat = route == CHAT
        self._words = words
        self._context_ids: list[int] = []
        self._characters = 0

    def add(self, piece: PieceLogprobs) -> dict[str, Any]:
        """`logprobs` of a choice, for these tokens."""
        found = [
            self._token(token_id, log_prob, top_ids, top_log_probs)
            for token_id, log_prob, top_ids, top_log_probs in zip(*piece, strict=True)
        ]
        if self._is_chat:
            return {"content": found, "refusal": None}
        offsets = []
        for each in found:
            offsets.append(self._characters)
            self._characters += len(each["token"])
        return {
            "tokens": [each["token"] for each in found],
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": [
                {best["token"]: best["logprob"] for best in reversed(each["top_logprobs"])}
                for each in found
            ],
            "text_offset": offsets,
        }

    def _token(
        self, token_id: int, log_prob: float, top_ids: list[int], top_log_probs: list[float]
    ) -> dict[str, Any]:
        best = [
            self._named(each, value) for each, value in zip(top_ids, top_log_probs, strict=True)
        ]
        named = {**self._named(token_id, log_prob), "top_logprobs": best}
        self._context_ids.append(token_id)
        return named

    def _named(self, token_id: int, log_prob: float) -> dict[str, Any]:
        raw = self._words.of(self._context_ids, token_id)
        return {
            "token": raw.decode("utf-8", "replace"), "logprob": max(log_prob, LEAST),
            "bytes": list(raw),
        }  # fmt: skip


def joined(pieces: list[PieceLogprobs]) -> PieceLogprobs:
    return PieceLogprobs(*([each for piece in pieces for each in piece[index]]
                           for index in range(4)))  # fmt: skip
