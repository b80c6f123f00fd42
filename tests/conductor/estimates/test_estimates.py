"""Fitting finds the coefficients that made the samples, and never predicts a negative time."""

from __future__ import annotations

import random

import pytest

from conductor.estimates.estimates import (
    UNCALIBRATED_DECODE,
    UNCALIBRATED_PREFILL,
    DecodeEstimate,
    DecodeSample,
    PrefillEstimate,
    PrefillSample,
    fit_decode,
    fit_prefill,
)

LENGTHS = [(n, p) for n in (1, 64, 500, 2_000, 8_000) for p in (0, 640, 8_000, 64_000)]


def prefill_samples(truth: PrefillEstimate, noise: float, seed: int) -> list[PrefillSample]:
    rng = random.Random(seed)
    return [
        PrefillSample(n, p, truth.seconds(n, p) * rng.uniform(1 - noise, 1 + noise))
        for n, p in LENGTHS
    ]


def test_a_prefill_fit_recovers_the_coefficients_that_made_the_samples() -> None:
    truth = PrefillEstimate(0.012, 3e-4, 2e-9)
    fit = fit_prefill(prefill_samples(truth, 0.0, 0))
    assert fit.estimate.coefficients == pytest.approx(truth.coefficients, rel=1e-6)
    assert fit.error_max < 1e-6 and fit.samples == len(LENGTHS)


def test_a_decode_fit_recovers_the_coefficients_that_made_the_samples() -> None:
    truth = DecodeEstimate(0.02, 3e-3, 1e-7)
    batches = [(n, n * c) for n in (1, 2, 8, 32) for c in (10, 1_000, 20_000)]
    fit = fit_decode([DecodeSample(n, c, truth.step_s(n, c)) for n, c in batches])
    assert fit.estimate.coefficients == pytest.approx(truth.coefficients, rel=1e-6)


def test_noise_of_ten_percent_gives_an_error_of_about_that(seed: int) -> None:
    fit = fit_prefill(prefill_samples(PrefillEstimate(0.012, 3e-4, 2e-9), 0.1, seed))
    assert fit.error_mean < 0.1 and fit.error_max < 0.35


def test_coefficients_are_never_negative(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        samples = [
            PrefillSample(rng.randint(1, 9_000), rng.randint(0, 9_000), rng.uniform(0.001, 9.0))
            for _ in range(rng.randint(1, 12))
        ]
        fit = fit_prefill(samples)
        assert min(fit.estimate.coefficients) >= 0
        assert fit.error_mean <= 1.0 + 1e-9, "predicting nothing would have been better"


def test_one_slow_warm_up_does_not_spoil_the_fit() -> None:
    truth = PrefillEstimate(0.012, 3e-4, 2e-9)
    samples = prefill_samples(truth, 0.0, 0)
    slow = PrefillSample(64, 0, 50 * truth.seconds(64, 0))
    fitted = fit_prefill([slow, *samples]).estimate
    assert fitted.seconds(2_000, 0) == pytest.approx(truth.seconds(2_000, 0), rel=0.1)


def test_samples_of_one_length_still_give_an_estimate() -> None:
    fit = fit_prefill([PrefillSample(100, 0, 0.1)] * 3)
    assert fit.estimate.seconds(100, 0) == pytest.approx(0.1)


def test_without_a_usable_sample_the_fit_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="measure at least three prompts"):
        fit_prefill([PrefillSample(0, 0, 0.1)])


def test_a_worker_without_coefficients_is_estimated_as_uncalibrated() -> None:
    assert PrefillEstimate.of(()) == UNCALIBRATED_PREFILL
    assert DecodeEstimate.of(()) == UNCALIBRATED_DECODE
    assert PrefillEstimate.of((1.0, 2.0, 3.0)).coefficients == (1.0, 2.0, 3.0)


def test_chunks_of_a_prompt_take_as_long_as_the_whole_but_for_the_base() -> None:
    estimate = PrefillEstimate(0.01, 1e-3, 1e-6)
    chunks = estimate.seconds(300, 0) + estimate.seconds(700, 300)
    assert chunks == pytest.approx(estimate.seconds(1_000, 0) + estimate.base_s)


def test_nothing_to_compute_takes_no_time() -> None:
    assert PrefillEstimate(0.01, 1e-3, 1e-6).seconds(0, 500) == 0.0
