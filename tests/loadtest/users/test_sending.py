"""One request of a user as a record; the server's words decide how it ended."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest.client.protocol import GenerateRequest, Rejected, ServerError, TokenEvent
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord
from loadtest.users.run import Outgoing, send_one


class ScriptedSender:
    """Plays events, then raises what it was given."""

    def __init__(self, *events: TokenEvent, error: Exception | None = None) -> None:
        self.events, self.error = events, error

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        yield from self.events
        if self.error:
            raise self.error

    def close(self) -> None:
        pass


def sent(sender: ScriptedSender, due_s: float | None = None) -> RequestRecord:
    request = GenerateRequest("chat-1-1", text_input="It is a truth", max_tokens=8)
    seconds = iter((10.0, 12.0))
    record, _ = send_one(sender, Outgoing(request, "chat", 4, due_s), 60.0, lambda: next(seconds))
    return record


def test_an_answer_keeps_the_time_of_every_token_and_the_servers_count() -> None:
    record = sent(
        ScriptedSender(
            TokenEvent(10.5, (7,), cached_tokens=0, input_tokens=5, decision={"prefill": "p"}),
            TokenEvent(10.7, (8, 9), finish_reason="length", decision={"decode_queue_s": 0.1}),
        )
    )
    assert record.outcome == COMPLETED and record.token_times_s == (10.5, 10.7, 10.7)
    assert (record.sent_s, record.due_s, record.finished_s) == (10.0, 10.0, 12.0)
    assert (record.prompt_tokens, record.output_tokens_asked) == (5, 8)
    assert record.decision == {"prefill": "p", "decode_queue_s": 0.1}
    assert record.ttft_s == 0.5 and record.workload == "chat"


def test_a_rejection_keeps_its_kind_and_when_to_come_back() -> None:
    record = sent(ScriptedSender(error=Rejected("ttft_slo", "too slow", 2.0)))
    assert (record.outcome, record.kind, record.retry_after_s) == (REJECTED, "ttft_slo", 2.0)
    assert record.prompt_tokens == 4, "the server did not count, so our estimate stands"


def test_an_answer_that_breaks_off_has_failed_and_keeps_its_tokens() -> None:
    broken = ServerError("unreachable", "gone")
    record = sent(ScriptedSender(TokenEvent(10.5, (7,)), error=broken))
    assert (record.outcome, record.kind, record.token_times_s) == (FAILED, "unreachable", (10.5,))


def test_a_request_that_was_due_earlier_says_so() -> None:
    assert sent(ScriptedSender(), due_s=9.0).lag_s == 1.0
