"""One request of a user, sent to its end, as a record.

Not here: what to send (workloads.py, trace_share.py), when (users.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.client.answer import StreamedAnswer, record_of
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.results.metrics import RequestRecord
from loadtest.users.sender import Sender


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
) -> tuple[RequestRecord, StreamedAnswer]:
    """Every way of ending is a record, except being cancelled, which raises."""
    answer, error = StreamedAnswer(), None
    sent_s = now_s()
    try:
        for event in sender.send(outgoing.request, timeout_s):
            answer.add(event)
    except ServerError as server_error:
        error = server_error
    record = record_of(
        answer,
        error,
        outgoing.request,
        due_s=sent_s if outgoing.due_s is None else outgoing.due_s,
        sent_s=sent_s,
        finished_s=now_s(),
        prompt_tokens=answer.input_tokens or outgoing.prompt_tokens,
        index=outgoing.index,
        workload=outgoing.workload,
    )
    return record, answer
