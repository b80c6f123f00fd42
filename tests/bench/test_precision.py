"""The columns of bench.precision, from log-probabilities that are known."""

from __future__ import annotations

import torch

from bench.precision.__main__ import Predictions, row_of, targets_of
from bench.precision.prompts import prompts

FIRST = [0.4, 0.3, 0.1, 0.1, 0.05, 0.05]
SECOND = [0.05, 0.05, 0.1, 0.1, 0.3, 0.4]


def predictions(rows: list[list[float]], answer: str = "It is Paris.") -> Predictions:
    made = torch.tensor(rows).log()
    return Predictions(made, made[0], answer)


REFERENCE = predictions([FIRST, SECOND])
CHANGED = predictions([[0.3, 0.4, *FIRST[2:]], SECOND], "It is Lyon.")


def test_there_are_200_prompts_without_duplicates() -> None:
    assert len(prompts()) == len(set(prompts())) == 200


def test_a_changed_first_token_counts_as_lost_and_has_its_gap() -> None:
    row = row_of("ours", CHANGED, REFERENCE, REFERENCE)
    assert (row["argmax_lost"], row["argmax_lost_alone"]) == (1, 1)
    assert row["lost_gap"] == row["max"] == 0.2877  # log(0.4 / 0.3)
    assert row["margin"] == -0.2877
    assert row["mean"] == round(2 * 0.28768 / 10, 5)


def test_a_token_that_transformers_changes_too_is_not_lost_alone() -> None:
    row = row_of("ours", CHANGED, REFERENCE, CHANGED)
    assert (row["argmax_lost"], row["argmax_lost_alone"]) == (1, 0)


def test_targets_compare_with_transformers_and_with_the_answer_of_float32() -> None:
    ours = row_of("ours", REFERENCE, REFERENCE, CHANGED)
    theirs = row_of("theirs", CHANGED, REFERENCE, CHANGED)
    assert [target.is_met for target in targets_of(ours, theirs, REFERENCE)] == [True] * 3
    assert [target.is_met for target in targets_of(theirs, ours | {"mean": 0.1}, REFERENCE)][
        2:
    ] == [False]


def test_without_transformers_its_targets_are_missing_with_a_reason() -> None:
    ours = row_of("ours", REFERENCE, REFERENCE, None)
    error, lost, answered = targets_of(ours, None, REFERENCE)
    assert error.value is lost.value is None
    assert "transformers" in error.why and "transformers" in lost.why
    assert answered.is_met


def test_an_answer_that_float32_does_not_give_either_is_no_target() -> None:
    ours = row_of("ours", CHANGED, CHANGED, None)
    assert targets_of(ours, None, CHANGED)[2].value is None
