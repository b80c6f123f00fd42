"""One request's answer as it arrives, and how the request ended. Any client fills these.

Not here: what the times mean (metrics.py), where the events come from (triton_client.py, swarm/).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.metrics import COMPLETED, FAILED, REJECTED
from loadtest.protocol import Rejected, ServerError, TokenEvent


@dataclass(slots=True)
class Answer:
    """What of one request's answer has arrived so far."""

    token_times_s: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    input_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    decision: dict[str, object] = field(default_factory=dict)

    def add(self, event: TokenEvent) -> None:
        self.token_times_s += [event.time_s] * len(event.output_ids)
        self.output_ids += event.output_ids
        if event.text:
            self.texts.append(event.text)
        if self.cached_tokens is None:
            self.cached_tokens = event.cached_tokens
        if self.input_tokens is None:
            self.input_tokens = event.input_tokens
        self.finish_reason = event.finish_reason or self.finish_reason
        self.decision |= event.decision or {}  # the last response adds what decode knows

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, in the words of a record (metrics.py)."""

    outcome: str = COMPLETED
    kind: str = ""
    message: str = ""
    retry_after_s: float | None = None


def ending(error: ServerError | None) -> Ending:
    """None: the answer is complete. A rejection is no failure."""
    if error is None:
        return Ending()
    if isinstance(error, Rejected):
        return Ending(REJECTED, error.kind, error.message, error.retry_after_s)
    return Ending(FAILED, error.kind, error.message)
