"""Which loss counts against a request, when it goes on, and when it is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import worker_tls
from backends.errors import (
    Cancelled,
    InvalidRequest,
    KvMissing,
    MessagesLost,
    Overloaded,
    ServingError,
    StoreLost,
    WorkerDistrusts,
    WorkerGone,
    WorkerUnavailable,
    WorkerUnreached,
    from_broken_call,
    from_wire,
)
from backends.frontend.lifecycle.attempts import (
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    RULES,
    Attempts,
    Loss,
    final_error,
    loss_by_death,
    loss_of,
)

FREE = [loss for loss, rule in RULES.items() if not rule.counts]
COUNTED = [loss for loss, rule in RULES.items() if rule.counts]


def test_every_loss_has_a_rule() -> None:
    assert set(RULES) == set(Loss)
    assert set(FREE) == {
        Loss.WORKER_FULL,
        Loss.WORKER_GONE,
        Loss.STORE_LOST,
        Loss.KV_GONE,
        Loss.MESSAGES_LOST,
        Loss.NO_WORKER,
        Loss.WORKER_UNREACHED,
        Loss.WORKER_REFUSED,
    }


@pytest.mark.parametrize("loss", FREE)
def test_what_is_not_the_request_s_fault_is_free_until_the_deadline(loss: Loss) -> None:
    attempts = Attempts(3, 0.0, 600.0)
    for _ in range(500):
        attempts = attempts.after(loss, sent_tokens=0, now_s=0.0)
        assert not attempts.given_up(now_s=599.9)
    assert "deadline" in attempts.given_up(now_s=600.0)


@pytest.mark.parametrize("loss", COUNTED)
def test_a_request_that_workers_die_of_is_given_up_at_the_third(loss: Loss) -> None:
    attempts = Attempts(3, 0.0, 600.0)
    for _ in range(2):
        attempts = attempts.after(loss, sent_tokens=0, now_s=0.0)
        assert not attempts.given_up(now_s=0.0)
    attempts = attempts.after(loss, sent_tokens=0, now_s=0.0)
    assert f"3 x {loss.value}" in attempts.given_up(now_s=0.0)


def test_tokens_do_not_forgive_deaths() -> None:
    """Else a prompt that kills at its hundredth token would kill for ever."""
    attempts = Attempts(2, 0.0, 600.0)
    attempts = attempts.after(Loss.WORKER_DIED, sent_tokens=100, now_s=0.0)
    attempts = attempts.after(Loss.WORKER_DIED, sent_tokens=200, now_s=0.0)
    assert attempts.given_up(now_s=0.0)


def test_a_deadline_ends_nothing_that_was_not_lost() -> None:
    assert not Attempts(3, 0.0, 1.0).given_up(now_s=2.0)


def test_a_long_answer_is_not_given_up_for_being_long() -> None:
    attempts = Attempts(3, 0.0, 600.0)
    attempts = attempts.after(Loss.KV_GONE, sent_tokens=30_000, now_s=5_000.0)
    assert not attempts.given_up(now_s=5_599.0)
    attempts = attempts.after(Loss.KV_GONE, sent_tokens=30_001, now_s=5_599.0)
    assert "deadline" in attempts.given_up(now_s=5_600.0), "a prefill's token puts nothing off"


def test_the_client_s_own_timeout_is_put_off_by_nothing() -> None:
    attempts = Attempts(3, 10.0, 600.0, timeout_s=20.0)
    attempts = attempts.after(Loss.KV_GONE, sent_tokens=50, now_s=25.0)
    assert not attempts.given_up(now_s=29.0)
    assert "deadline" in attempts.given_up(now_s=30.0)


def test_the_first_loss_costs_no_pause_and_those_in_a_row_ever_longer_ones() -> None:
    attempts, pauses_s = Attempts(3, 0.0, 600.0), []
    for _ in range(12):
        attempts = attempts.after(Loss.KV_GONE, sent_tokens=0, now_s=0.0)
        pauses_s.append(attempts.pause_s(now_s=0.0))
    assert pauses_s[:3] == [0.0, PAUSE_S_MIN, 2 * PAUSE_S_MIN]
    assert pauses_s == sorted(pauses_s) and pauses_s[-1] == PAUSE_S_MAX


def test_decoded_tokens_for_the_client_make_pauses_short_again() -> None:
    attempts = Attempts(3, 0.0, 600.0)
    for _ in range(5):
        attempts = attempts.after(Loss.STORE_LOST, sent_tokens=7, now_s=0.0)
    attempts = attempts.after(Loss.STORE_LOST, sent_tokens=8, now_s=0.0)
    assert attempts.pause_s(now_s=0.0) > 0.0, "that one was the prefill's"
    attempts = attempts.after(Loss.STORE_LOST, sent_tokens=10, now_s=0.0)
    assert attempts.pause_s(now_s=0.0) == 0.0


def test_first_retry_without_an_available_worker_has_a_pause() -> None:
    attempts = Attempts(3, 0.0, 600.0)
    attempts = attempts.after(Loss.NO_WORKER, sent_tokens=0, now_s=0.0)
    assert attempts.pause_s(now_s=0.0) == PAUSE_S_MIN


@given(st.lists(st.sampled_from(FREE), max_size=300), st.floats(0.0, 100.0))
def test_a_pause_is_bounded_and_ends_at_the_deadline(losses: list[Loss], now_s: float) -> None:
    attempts = Attempts(3, 0.0, 50.0)
    for loss in losses:
        attempts = attempts.after(loss, sent_tokens=0, now_s=0.0)
        assert 0.0 <= attempts.pause_s(now_s) <= min(PAUSE_S_MAX, max(0.0, 50.0 - now_s))


def test_only_a_request_that_was_let_in_before_is_resumed() -> None:
    attempts = Attempts(3, 0.0, 600.0)
    assert not attempts.is_resumed
    attempts = attempts.after(Loss.NO_ROOM, sent_tokens=0, now_s=0.0)
    assert not attempts.is_resumed
    attempts = attempts.after(Loss.KV_GONE, sent_tokens=0, now_s=0.0)
    assert attempts.is_resumed


# --- what was it?


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (KvMissing("blocks [3] of 9 are gone"), Loss.KV_GONE),
        (StoreLost("the directory does not answer"), Loss.STORE_LOST),
        (WorkerGone("decode_0 is shutting down"), Loss.WORKER_GONE),
        (MessagesLost("5 of 7 tokens arrived"), Loss.MESSAGES_LOST),
        (WorkerUnavailable("decode_0: internal_error: ValueError"), Loss.WORKER_FAILED),
        (Overloaded("store_full", "no room", 1.0), Loss.NO_ROOM),
        (Overloaded("ttft_slo", "too late", 1.0), None),
        (Overloaded("no_decode_worker", "none", 1.0), None),
        (InvalidRequest("wrong"), None),
        (Cancelled("it left"), None),
    ],
)
def test_an_error_of_a_new_request_says_what_was_lost(
    error: ServingError, loss: Loss | None
) -> None:
    assert loss_of(error, is_resumed=False) is loss


@pytest.mark.parametrize("kind", ["no_decode_worker", "decode_queue_full", "ttft_slo"])
def test_a_request_that_goes_on_is_shed_by_nobody(kind: str) -> None:
    assert loss_of(Overloaded(kind, "", 1.0), is_resumed=True) is Loss.NO_WORKER


def test_a_request_that_has_grown_too_large_for_every_worker_waits_for_none() -> None:
    assert loss_of(Overloaded("too_large", "", 0.0), is_resumed=True) is None


FULL_KINDS = ("prefill_queue_full", "decode_queue_full", "decode_overload")


@pytest.mark.parametrize("kind", FULL_KINDS)
def test_a_full_worker_is_left_for_another_one_where_others_fill_them_too(kind: str) -> None:
    full = Overloaded(kind, "", 1.0)
    assert loss_of(full, is_resumed=False) is None, "who is alone knows how full all of them are"
    assert loss_of(full, is_resumed=False, asks_others=True) is Loss.WORKER_FULL
    assert loss_of(full, is_resumed=True, asks_others=True) is Loss.NO_WORKER
    rejected = Overloaded("decode_full", "", 1.0)
    assert loss_of(rejected, is_resumed=False, asks_others=True) is None, "the conductor's word"
    assert RULES[Loss.WORKER_FULL].avoids and not RULES[Loss.WORKER_FULL].counts


def test_only_so_many_full_workers_lead_to_another_one_and_none_lets_a_request_in() -> None:
    attempts = Attempts(3, 0.0, 600.0, full_workers_max=2)
    for _ in range(2):
        assert attempts.asks_others and not attempts.is_resumed
        attempts = attempts.after(Loss.WORKER_FULL, sent_tokens=1, now_s=0.0)
    assert not attempts.asks_others and not attempts.is_resumed
    assert not attempts.given_up(1.0) and attempts.given_up(600.0)
    assert attempts.after(Loss.KV_GONE, sent_tokens=1, now_s=0.0).is_resumed
    assert attempts.after(Loss.WORKER_FULL, sent_tokens=2, now_s=0.0).is_resumed


def test_a_node_without_room_is_left_for_another_one_at_no_cost_to_who_goes_on() -> None:
    assert loss_of(Overloaded("store_full", "", 1.0), is_resumed=True) is Loss.STORE_LOST
    assert RULES[Loss.STORE_LOST].avoids


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("unavailable: store: the directory does not answer", StoreLost),
        (WorkerGone("decode_0 is shutting down").wire_message(), WorkerGone),
        (WorkerDistrusts("another secret").wire_message(), WorkerDistrusts),
        ("Request for unknown model: 'decode_7' is not found", WorkerGone),
        ("Stub process 'decode_0_0' is not healthy.", WorkerGone),
        ("Server has stopped accepting new requests.", WorkerGone),
        ("unavailable: decode_0: internal_error: ValueError: x", WorkerUnavailable),
        ("internal_error: ValueError: x", WorkerUnavailable),
    ],
)
def test_an_error_keeps_its_class_on_its_way_from_a_worker(
    message: str, kind: type[ServingError]
) -> None:
    assert type(from_wire(message, "decode_0")) is kind


def test_a_call_that_was_never_sent_found_nobody_and_a_broken_one_was_in_somebody_s_hands() -> None:
    refused = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"
    assert type(from_broken_call("decode_0", "UNAVAILABLE", refused)) is WorkerUnreached
    for details in ("Stream removed (Socket closed)", "recvmsg:Connection reset by peer", None):
        broken = from_broken_call("decode_0", "UNAVAILABLE", details)
        assert type(broken) is WorkerUnavailable


def test_what_only_the_way_to_a_worker_did_never_counts() -> None:
    """As gRPC words them: keys that are not believed, and a link that is cut during a call."""
    strange = "failed to connect to all addresses; last error: UNKNOWN: Tls handshake failed"
    refused = worker_tls.refusal("10.0.0.1:1", strange)
    assert refused is not None
    cut = from_broken_call("p0", "UNAVAILABLE", "Stream removed (recvmsg:Connection timed out)")
    for error in (refused, cut):
        loss = loss_of(error, is_resumed=False)
        assert loss is not None and not RULES[loss].counts and RULES[loss].avoids, error


def test_a_worker_that_was_silent_before_the_call_never_had_the_request() -> None:
    assert loss_by_death(called_s=100.0, seen_s=98.5) is Loss.WORKER_GONE


@pytest.mark.parametrize("seen_s", [99.5, 100.0, 130.0])
def test_a_worker_that_may_have_been_alive_when_called_had_the_request(seen_s: float) -> None:
    assert loss_by_death(called_s=100.0, seen_s=seen_s) is Loss.WORKER_DIED


# --- the end


def test_a_client_reads_what_happened() -> None:
    attempts = Attempts(3, 0.0, 5.0)
    attempts = attempts.after(Loss.WORKER_DIED, sent_tokens=0, now_s=0.0)
    for _ in range(4):
        attempts = attempts.after(Loss.NO_WORKER, sent_tokens=0, now_s=0.0)
    error = final_error(
        Overloaded("no_decode_worker", "none is there", 1.0), attempts.given_up(9.0)
    )
    assert error.wire_message() == (
        "unavailable: none is there; its deadline has passed "
        "(4 x no worker was available, 1 x a worker died with the request)"
    )


def test_the_last_word_keeps_the_kind_of_the_last_loss() -> None:
    assert isinstance(final_error(KvMissing("gone"), "why"), KvMissing)
    assert isinstance(final_error(StoreLost("down"), "why"), WorkerUnavailable)
    full = final_error(Overloaded("store_full", "no room", 2.0), "why")
    assert isinstance(full, Overloaded) and full.kind == "store_full"
