"""One request of a user, sent to its end, as a record.

Not here: what to send (workloads.py, trace_share.py), when (users.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.answer import Answer, ending
from loadtest.metrics import RequestRecord
from loadtest.protocol import GenerateRequest, ServerError
from loadtest.swarm.sender import Sender


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request, and what its record says besides."""

    request: GenerateRequest
    workload: str
    prompt_tokens: int  # an estimate where the prompt is text; the server's count replaces it
    due_s: float | None = None  # None: it is due when it is sent
    index: int = 0


def send_one(
    sender: Sender, outgoing: Outgoing, timeout_s: float, now_s: Callable[[], float]
) -> tuple[RequestRecord, Answer]:
    """Every way of ending is a record, except being cancelled, which raises."""
    answer, error = Answer(), None
    sent_s = now_s()
    try:
        for event in sender.send(outgoing.request, timeout_s):
            answer.add(event)
    except ServerError as server_error:
        error = server_error
    end = ending(error)
    record = RequestRecord(
        index=outgoing.index,
        request_id=outgoing.request.request_id,
        due_s=sent_s if outgoing.due_s is None else outgoing.due_s,
        sent_s=sent_s,
        finished_s=now_s(),
        prompt_tokens=answer.input_tokens or outgoing.prompt_tokens,
        output_tokens_asked=outgoing.request.max_tokens or 0,
        outcome=end.outcome,
        kind=end.kind,
        message=end.message,
        retry_after_s=end.retry_after_s,
        token_times_s=tuple(answer.token_times_s),
        cached_tokens=answer.cached_tokens,
        finish_reason=answer.finish_reason,
        decision=answer.decision or None,
        workload=outgoing.workload,
    )
    return record, answer
