"""Logprobs of an answer and its prompt in OpenAI's formats, from the conductor's tensors. Pure.

A chat has an object for each token; a completion has parallel lists. The text of a token is the
text that it adds to the tokens before it. If a token's bytes are not complete characters, its text
has U+FFFD instead, and its `bytes` has the bytes.

A completion may begin with its prompt (`echo`). Then the lists begin with the prompt's tokens. The
list `prompt_logprobs` has vLLM's format. In both, the first token of the prompt has null.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from backends.gateway.request.fields import CHAT
from backends.gateway.request.infer_request import PromptUse
from backends.text.token_bytes import CONTEXT_TOKENS

LEAST = -9999.0  # OpenAI's value for an impossible token, because JSON has no infinity


class PieceLogprobs(NamedTuple):
    """Logprobs of the tokens of one message. `top_ids`: per position, the likeliest ids first."""

    token_ids: list[int]
    log_probs: list[float | None]  # None: of a prompt's first token
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
        self._echoed: list[dict[str, Any]] = []  # tokens of the prompt, for the next `add`

    def echo(self, found: list[dict[str, Any]], text: bytes) -> None:
        """Put the tokens of the prompt, whose text is `text`, before those of the next `add`."""
        raw = b"".join(bytes(each["bytes"]) for each in found)
        # Special tokens that the tokenizer added are not in the text, and have offset 0.
        added = len(raw.decode("utf-8", "replace")) - len(text.decode("utf-8", "replace"))
        self._echoed, self._text = found, _TextOffsets(-max(added, 0))

    def add(self, piece: PieceLogprobs) -> dict[str, Any]:
        """The field `logprobs` of an answer's choice, for these tokens."""
        found, self._echoed = self._echoed + self.read(piece), []
        if self._is_chat:
            return {"content": found, "refusal": None}
        return {
            "tokens": [each["token"] for each in found],
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": [
                None if each["logprob"] is None else _by_token(each) for each in found
            ],
            "text_offset": [self._text.add(bytes(each["bytes"])) for each in found],
        }

    def read(self, piece: PieceLogprobs) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for token_id, log_prob, top_ids, top_log_probs in zip(*piece, strict=True):
            best = [self._named(*each) for each in zip(top_ids, top_log_probs, strict=True)]
            found.append({**self._named(token_id, log_prob), "top_logprobs": best})
            self._context_ids.append(token_id)
        return found

    def _named(self, token_id: int, log_prob: float | None) -> dict[str, Any]:
        raw = self._words.of(self._context_ids, token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": None if log_prob is None else max(log_prob, LEAST),
            "bytes": list(raw),
        }


def _by_token(logprobs: Mapping[str, Any]) -> dict[str, float]:
    """Token -> logprob, of the token itself and the likeliest ones. Of equal texts, the likeliest
    counts."""
    listed = [logprobs, *reversed(logprobs["top_logprobs"])]
    return {each["token"]: each["logprob"] for each in listed}


class _TextOffsets:
    """Computes the offset of each token in the text, in characters."""

    def __init__(self, characters: int = 0) -> None:
        """`characters`: minus the number of characters that do not count."""
        self._characters = characters  # number of complete or invalid characters so far
        self._begun = b""  # bytes of an incomplete character at the end

    def add(self, raw: bytes) -> int:
        """The offset of the next token, which has these bytes. If several tokens form one
        character, each has the offset of this character."""
        if raw and self._begun and not _goes_on(self._begun, raw):
            self._characters += len(self._begun.decode("utf-8", "replace"))
            self._begun = b""
        offset = max(self._characters, 0)
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


class PromptWriter:
    """Writes the part of one answer that is about its prompt."""

    def __init__(
        self,
        use: PromptUse,
        inputs: Mapping[str, Any],
        words: TokenWords,
        logprobs: LogprobsWriter | None,
    ) -> None:
        """`inputs`: tensors of the request. `logprobs`: the writer of the answer."""
        self.use = use
        self._prompt = inputs.get("text_input") or inputs.get("input_ids", [])
        self._words, self._logprobs = words, logprobs
        self.is_begun = False

    def begin(self, prompt: PieceLogprobs | None, ranks: list[int]) -> tuple[bytes, bytes]:
        """(text, JSON of `prompt_logprobs`) to put before the answer; empty after the first call.

        `prompt`: the tokens of the prompt; None if the request has no logprobs of the prompt.
        `ranks`: of each token; 1: no token is likelier."""
        if self.is_begun:
            return b"", b""
        self.is_begun = True
        use, text = self.use, self._text() if self.use.is_echoed else b""
        if prompt is None:
            return text, b""
        prompt.log_probs[0] = None
        found = (self._logprobs or LogprobsWriter(CHAT, self._words)).read(prompt)
        listed = b"" if use.top is None else _listed(prompt, ranks, found, use.top)
        if use.is_echoed and self._logprobs is not None:
            for each in found:
                del each["top_logprobs"][use.echoed_top :]
            self._logprobs.echo(found, text)
        return text, listed

    def _text(self) -> bytes:
        if isinstance(ids := self._prompt, str):
            return ids.encode("utf-8", "replace")
        recent = 2 * CONTEXT_TOKENS
        words = (self._words.of(ids[max(at - recent, 0) : at], ids[at]) for at in range(len(ids)))
        return b"".join(words)


def _listed(
    prompt: PieceLogprobs, ranks: list[int], found: list[dict[str, Any]], top: int
) -> bytes:
    """vLLM's `prompt_logprobs` as JSON: at each position the prompt's token and the best ones."""
    listed: list[dict[str, Any] | None] = [None]
    scored = zip(prompt.token_ids, prompt.top_ids, ranks, found, strict=True)
    for token_id, top_ids, rank, each in itertools.islice(scored, 1, None):
        best = zip(top_ids[:top], itertools.count(1), each["top_logprobs"], strict=False)
        listed.append(
            {
                str(its_id): {
                    "logprob": one["logprob"],
                    "rank": its_rank,
                    "decoded_token": one["token"],
                }
                for its_id, its_rank, one in ((token_id, rank, each), *best)
            }
        )
    return msgspec.json.encode(listed)
