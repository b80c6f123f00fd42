"""What a release's sampler would ignore without a word is refused with one."""

from __future__ import annotations

from typing import Any

import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.trtllm.sampling import NEUTRAL, Sampler, llm_sampling, release
from backends.errors import InvalidRequest

DRAWN: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_p": 0.1,
    "seed": 7,
}


def refusal(version: str, sampler_type: str = "auto", **asked: Any) -> str:
    params = SamplingParams(max_tokens=1, **{"temperature": 1.0, **asked})
    return Sampler.of(version, {"sampler_type": sampler_type}).refusal(params)


@pytest.mark.parametrize(
    "version", ["1.2.0", "1.2.1", "1.2.0rc8", "1.3.0rc14", "of unknown version"]
)
@pytest.mark.parametrize("name", DRAWN)
def test_a_release_that_ignores_a_parameter_refuses_it_by_name(version: str, name: str) -> None:
    assert set(DRAWN) == set(NEUTRAL)
    said = refusal(version, **{name: DRAWN[name]})
    assert f"{name} {DRAWN[name]}" in said and version in said and "TRTLLMSampler" in said


def test_everything_that_is_ignored_is_named_at_once() -> None:
    said = refusal("1.2.1", **DRAWN)
    assert all(name in said for name in DRAWN)


def test_what_is_neutral_is_not_refused() -> None:
    assert not refusal("1.2.1", **NEUTRAL, top_k=3, top_p=0.5, min_tokens=1)


def test_where_tokens_are_greedy_only_penalties_matter() -> None:
    assert not refusal("1.2.1", temperature=0.0, seed=7, min_p=0.5)
    assert refusal("1.2.1", temperature=0.0, presence_penalty=1.0)


@pytest.mark.parametrize("version", ["1.3.0rc24", "1.3.0rc29", "1.3.0", "1.4.0rc1"])
def test_releases_that_heed_penalties_and_min_p_get_them(version: str) -> None:
    assert not refusal(version, **{name: DRAWN[name] for name in DRAWN if name != "seed"})


def test_a_seed_that_only_the_first_of_a_batch_would_get_is_refused() -> None:
    assert "seed 7" in refusal("1.4.0rc1", seed=7)


def test_the_older_sampler_heeds_them_all() -> None:
    assert not refusal("1.2.1", "TRTLLMSampler", **DRAWN)


def test_a_request_with_an_ignored_parameter_is_invalid_and_the_default_seed_is_not_sent() -> None:
    sampler, made = Sampler("1.2.1"), []

    def cls(**keywords: Any) -> None:
        made.append(keywords)

    llm_sampling(cls, sampler, SamplingParams(max_tokens=1, temperature=1.0), 3, 1, 9)
    assert "seed" not in made[0], "the same seed for all would be no seed at all"
    with pytest.raises(InvalidRequest, match="would ignore presence_penalty 1, seed 3"):
        params = SamplingParams(max_tokens=1, temperature=1.0, presence_penalty=1.0, seed=3)
        llm_sampling(cls, sampler, params, 0, 1, 9)


def test_releases_are_compared_by_number_and_candidate() -> None:
    order = [
        "nonsense",
        "1.2.0rc8",
        "1.2.0",
        "1.2.1",
        "1.3.0rc2",
        "1.3.0rc14",
        "1.3.0rc15.post1",
        "1.3.0",
        "1.4.0rc0",
    ]
    assert [release(each) for each in order] == sorted(release(each) for each in order)
