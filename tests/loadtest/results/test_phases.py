"""Where the time went: phases add up to what the client waited, and what is unknown stays so."""

from __future__ import annotations

import pytest

from loadtest.results.metrics import REJECTED
from loadtest.results.phases import PHASES, by_ttft, mean_of, measured, phases_of, predicted_ttft_s
from tests.loadtest.report.runs import DECISION, answered, unserved


def test_the_phases_of_a_request_add_up_to_its_whole_time() -> None:
    phases = phases_of(answered())
    assert phases is not None and tuple(phases.all) == PHASES
    assert sum(phases.all.values()) == pytest.approx(1.1)
    assert phases.all == pytest.approx(
        {
            "queue": 0.1,
            "transfer": 0.05,
            "prefill": 0.2,
            "hand-over": 0.05 + 0.05,
            "decode": 0.5 - 0.1,
            "elsewhere": 1.1 - 0.85,
        }
    )


def test_until_the_first_token_they_add_up_to_the_ttft() -> None:
    phases = phases_of(answered())
    assert phases is not None
    assert sum(phases.until_first_token.values()) == pytest.approx(0.5)
    assert not {"hand-over", "decode"} & phases.until_first_token.keys(), "they come after it"


def test_no_phase_is_negative_when_clocks_disagree() -> None:
    decision = {**DECISION, "queue_s": 9.0, "decode_queue_s": 9.0}
    phases = phases_of(answered(decision=decision))
    assert phases is not None
    assert phases.all["decode"] == phases.all["elsewhere"] == 0.0
    assert phases.until_first_token["elsewhere"] == 0.0


def test_an_answer_of_one_token_has_no_decode() -> None:
    decision = {name: DECISION[name] for name in ("queue_s", "load_s", "prefill_s", "put_s")}
    phases = phases_of(answered(token_times_s=(0.5,), finished_s=0.5, decision=decision))
    assert phases is not None and phases.all["decode"] == 0.0
    assert phases.all["hand-over"] == 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"decision": None},
        {"decision": {}},
        {"decision": {**DECISION, "queue_s": "long"}},
        {"decision": {**DECISION, "put_s": -1.0}},
        {"decision": {**DECISION, "prefill_s": None}},
        {"token_times_s": ()},
        {"outcome": REJECTED},
    ],
)
def test_a_request_that_does_not_say_where_its_time_went_was_not_measured(changes: dict) -> None:
    assert phases_of(answered(**changes)) is None


def test_groups_go_from_the_fastest_to_the_slowest_and_hold_every_request() -> None:
    slow_last = [answered(i, token_times_s=(i + 0.5 + i / 10,)) for i in range(25)]
    groups = by_ttft(measured(slow_last))
    assert [group.requests for group in groups] == [2, 3, 2, 3, 2, 3, 2, 3, 2, 3]
    assert [group.ttft_s for group in groups] == sorted(group.ttft_s for group in groups)
    assert by_ttft([]) == []
    assert [group.requests for group in by_ttft(measured(slow_last[:3]))] == [1, 1, 1]


def test_a_mean_is_taken_phase_by_phase() -> None:
    assert mean_of([{"queue": 1.0, "decode": 2.0}, {"queue": 3.0, "decode": 0.0}]) == {
        "queue": 2.0,
        "decode": 1.0,
    }


def test_a_prediction_is_read_only_where_there_is_one() -> None:
    assert predicted_ttft_s(answered()) == 0.4
    assert predicted_ttft_s(answered(decision={"predicted": "soon"})) is None
    assert predicted_ttft_s(unserved(0, REJECTED, "ttft_slo")) is None
