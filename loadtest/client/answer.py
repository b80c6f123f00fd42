"""One request's answer as it arrives, and the record made of it. All clients use these."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.client.protocol import GenerateRequest, Rejected, ServerError, TokenEvent
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord


@dataclass(slots=True)
class ReceivedAnswer:
    token_times_s: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    input_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    decision: dict[str, object] = field(default_factory=dict)

    def add(self, event: TokenEvent) -> None:
        self.token_times_s += [event.time_s] * (len(event.output_ids) or event.tokens)
        self.output_ids += event.output_ids
        if event.text:
            self.texts.append(event.text)
        if self.cached_tokens is None:
            self.cached_tokens = event.cached_tokens
        if self.input_tokens is None:
            self.input_tokens = event.input_tokens
        self.finish_reason = event.finish_reason or self.finish_reason
        self.decision |= event.decision or {}  # the last response adds the decode worker's part

    @property
    def text(self) -> str:
        return "".join(self.texts)


def record_of(
    answer: ReceivedAnswer,
    error: ServerError | None,
    request: GenerateRequest,
    *,
    due_s: float,
    sent_s: float,
    finished_s: float,
    prompt_tokens: int,
    index: int = 0,
    workload: str = "",
    output_ids: tuple[int, ...] = (),
) -> RequestRecord:
    """How the request ended; without an error its answer is complete. A rejection is no failure."""
    outcome = COMPLETED
    if error is not None:
        outcome = REJECTED if isinstance(error, Rejected) else FAILED
    return RequestRecord(
        index=index,
        request_id=request.request_id,
        due_s=due_s,
        sent_s=sent_s,
        finished_s=finished_s,
        prompt_tokens=prompt_tokens,
        output_tokens_asked=request.max_tokens or 0,
        outcome=outcome,
        kind=error.kind if error is not None else "",
        message=error.message if error is not None else "",
        retry_after_s=error.retry_after_s if isinstance(error, Rejected) else None,
        token_times_s=tuple(answer.token_times_s),
        output_ids=output_ids,
        cached_tokens=answer.cached_tokens,
        finish_reason=answer.finish_reason,
        decision=answer.decision or None,
        workload=workload,
    )
