"""An answer as it arrives from the conductor, and what is known of it while it is sent on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backends.gateway.answer.logprobs import LogprobsWriter, PieceLogprobs
from backends.text.reasoning import ThinkingReader, Thought
from backends.text.tool_calls.parser import CallReader, Part


class AnswerPiece(NamedTuple):
    """The part of an answer in one message of the conductor. Counts are 0 unless requested."""

    text: bytes
    finish_reason: str  # a key of FINISH_REASONS; "": more pieces follow
    output_tokens: int = 0  # tokens in this message
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: PieceLogprobs | None = None
    decision: bytes = b""  # JSON of the routing decision; b"" in most pieces, and if not requested
    index: int = 0  # of its answer, among all answers of the request
    prompt_logprobs: bytes = b""  # JSON, in the first piece of an answer; b"": not requested
    token_ids: list[int] | None = None  # of this message; None unless requested, as prompt_ids
    prompt_ids: list[int] | None = None  # [] after the first message of an answer


@dataclass(slots=True)
class ChoiceWriter:
    """The state of one answer while its events are written."""

    logprobs: LogprobsWriter | None = None  # None: the client gets none
    reader: CallReader | ThinkingReader | None = None  # None: the answer is text
    has_calls: bool = False  # True once a part of a call was written
    is_begun: bool = False  # True once an event was written
    prompt_ids: bytes = b""  # for the first event of a chat; b"": not requested
    before: bytes = b""  # constant bytes of an event before the text, as the next one
    before_delta: bytes = b""

    def push(self, piece: AnswerPiece) -> list[Thought | Part]:
        """The parts that the piece adds."""
        text = piece.text.decode("utf-8", "replace")
        if self.reader is None:
            return [text] if text else []
        found: list[Thought | Part] = []
        if isinstance(self.reader, ThinkingReader):
            found += self.reader.push(text, piece.output_tokens)
        else:
            found += self.reader.push(text)
        if piece.finish_reason:
            found += self.reader.finish()
        return found


def thinking_tokens(choices: Sequence[ChoiceWriter]) -> int | None:
    """Tokens of the thinking in all answers; None if the model does not think."""
    readers = [each.reader for each in choices if isinstance(each.reader, ThinkingReader)]
    return sum(each.thinking_tokens for each in readers) if readers else None
