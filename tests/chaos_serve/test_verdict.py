"""The verdict on an attacked fleet notices what it is there to notice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from backends.engine.sampling_params import SamplingParams
from bench.harness.processes import Look
from tests.chaos_serve.answers import RightAnswer, is_tie
from tests.chaos_serve.fault_injector import InjectedFault
from tests.chaos_serve.streams import ChaosPrompt, EndedRequest, prompts
from tests.chaos_serve.verdict import ChaosReport, judge, judge_growth, shown

PROMPT = ChaosPrompt(0, (20, 21), max_tokens=4, temperature=0.0, seed=1)
RIGHT = {0: RightAnswer((5, 6, 7, 8), frozenset({2}))}
FINE = EndedRequest(
    "r", PROMPT, "a", sent_s=10.0, ended_s=12.0, tokens=(5, 6, 7, 8), outcome="finished"
)
KILL = InjectedFault(
    "kill frontend", ("a",), "kill triton frontend of a", 11.0, undone_s=11.0, recovered_s=15.0
)


def judged(*ended: EndedRequest, injected: tuple[InjectedFault, ...] = ()) -> ChaosReport:
    report = ChaosReport(1, 60.0)
    judge(report, ended, injected, RIGHT)
    return report


def test_right_answers_break_no_promise() -> None:
    report = judged(FINE, FINE)
    assert report.broken == [] and report.finished_share == 1.0
    assert json.loads(report.to_json())["outcomes"] == {"finished": 2}


@pytest.mark.parametrize(
    ("tokens", "outcome", "words"),
    [
        ((5, 9, 7, 8), "finished", "wrong tokens: r, prompt 0, from token 1"),
        ((9, 6, 7, 8), "finished", "from token 0"),
        ((5, 6, 7), "finished", "(3 came"),
        ((5, 6, 7, 8, 8), "finished", "(5 came"),
        ((5, 9), "unavailable", "from token 1"),
        ((5, 6, 7, 9), "finished", "from token 3"),
    ],
)
def test_a_wrong_a_missing_and_a_further_token_are_noticed(
    tokens: tuple[int, ...], outcome: str, words: str
) -> None:
    report = judged(replace(FINE, tokens=tokens, outcome=outcome))
    assert report.wrong_tokens == 1
    assert any(words in line for line in report.broken), report.broken


def test_where_two_tokens_are_right_what_follows_is_not_compared() -> None:
    report = judged(replace(FINE, tokens=(5, 6, 9, 9)))
    assert report.broken == [] and report.ties == 1


def test_a_request_that_hangs_is_noticed_whoever_was_killed() -> None:
    hung = replace(FINE, outcome="hung", tokens=(5,), ended_s=70.0)
    assert judged(FINE, hung).hung == 1
    report = judged(FINE, hung, injected=(KILL,))
    assert report.hung == 1 and any(line.startswith("hung") for line in report.broken)


def test_one_of_a_hundred_may_end_with_a_typed_error_and_two_may_not() -> None:
    failed = replace(FINE, outcome="unavailable", tokens=(5,))
    assert judged(*[FINE] * 99, failed).broken == []
    assert "98.00% of 100 streams" in judged(*[FINE] * 98, failed, failed).broken[0]


def test_a_connection_that_breaks_is_an_error_of_ours_only_if_the_frontend_was_killed() -> None:
    cut = replace(FINE, outcome="unreachable", tokens=(5,))
    whole = [FINE] * 200
    assert "no typed error" in judged(*whole, cut).broken[0]
    of_another = replace(KILL, hosts=("b",))
    assert "no typed error" in judged(*whole, cut, injected=(of_another,)).broken[0]
    before = replace(FINE, sent_s=1.0, ended_s=5.0)
    report = judged(before, cut, injected=(KILL,))
    assert report.broken == [] and dict(report.apart) == {"unreachable": 1}
    assert report.finished_share == 1.0


def test_a_stream_of_a_killed_frontend_that_lingers_is_noticed() -> None:
    late = replace(FINE, outcome="unreachable", tokens=(), ended_s=20.0)
    before = replace(FINE, sent_s=1.0, ended_s=5.0)
    assert "ended only 9.0 s later" in judged(before, late, injected=(KILL,)).broken[0]
    down = InjectedFault("link down", KILL.hosts, "e0 of a down", KILL.began_s - 5.0)
    for undone_s, is_noticed in ((KILL.began_s + 3.0, False), (KILL.began_s - 1.0, True)):
        link = replace(down, undone_s=undone_s, recovered_s=undone_s + 1.0)
        assert bool(judged(before, late, injected=(link, KILL)).broken) == is_noticed
    begun_later = replace(late, sent_s=11.5)
    assert judged(before, begun_later, injected=(KILL,)).broken == []


def test_a_host_that_does_not_recover_is_noticed() -> None:
    lost = InjectedFault(
        "kill node", ("c",), "kill node c0 of c", 1.0, undone_s=1.0, problem="c: no c0"
    )
    report = judged(FINE, injected=(lost,))
    assert report.broken == ["not recovered from kill node c0 of c: c: no c0"]
    assert "never recovered" in shown(report)


def test_without_a_request_to_a_frontend_that_lived_nothing_is_promised() -> None:
    assert judged(replace(FINE, outcome="unreachable"), injected=(KILL,)).broken
    assert judged().broken


def test_what_grew_and_what_is_gone_is_noticed() -> None:
    before = {"a: node a0": Look(0.0, 100 << 20, 20, 50)}
    for after, words in (
        (Look(9.0, 100 << 20, 20, 116), "66 more descriptors"),
        (Look(9.0, 100 << 20, 50, 50), "30 more threads"),
        (Look(9.0, 150 << 20, 20, 50), "50 MiB more"),
    ):
        report = ChaosReport(1, 1.0)
        judge_growth(report, before, {"a: node a0": after})
        assert words in report.broken[0]
    report = ChaosReport(1, 1.0)
    judge_growth(report, before, before)
    made_once = Look(9.0, 100 << 20, 24, 50 + 27 + 16 + 6)
    judge_growth(report, before, {"a: node a0": made_once})
    assert report.broken == []
    judge_growth(report, before, {})
    assert "does not run any more" in report.broken[0]


def test_prompts_follow_from_the_seed_and_share_prefixes(seed: int) -> None:
    made = prompts(seed)
    assert made == prompts(seed) != prompts(seed + 1)
    stems = [prompt.input_ids[:200] for prompt in made if len(prompt.input_ids) >= 200]
    assert len(set(stems)) < len(stems)


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [
        ([1.0, 2.0, 3.0, 0.0], 0.0, False),
        ([1.0, 3.0 - 1e-6, 3.0, 0.0], 0.0, True),
        ([1.0, 2.0, 3.0, 0.0], 1.0, False),
        ([1.0, 1.0 + 1e-6, 3.0, 0.0], 1.0, True),  # the third may be either
    ],
)
def test_a_position_where_two_tokens_are_right_is_known(
    logits: list[float], temperature: float, expected: bool
) -> None:
    params = SamplingParams(
        max_tokens=4, temperature=temperature, seed=7, top_k=2 if temperature else 0
    )
    assert is_tie(np.array(logits, np.float32), params, position=0) is expected
