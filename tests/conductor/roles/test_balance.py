"""The conductor proposes flips: from what it was asked for, one frontend of several."""

from __future__ import annotations

from conductor import Conductor, ConductorConfig
from conductor.messages import RoleFlip
from tests.conductor.fleet import WorkerReported, fleet, prompt, report

WORKERS = [f"p{n}" for n in range(2)] + [f"d{n}" for n in range(4)]


def made(mode: str, frontend: str = "f0") -> Conductor:
    config = ConductorConfig(
        role_flips=mode, ttft_slo_s=5.0, tbt_slo_s=0.2, admission="none", advisory=True
    )
    found = Conductor(config, frontend=frontend)
    found.on_events(fleet(2, 4, 2, can_flip=True), 0.0)
    return found


def busy_prefill(
    conductors: list[Conductor], seconds: int = 60, per_s: int = 2
) -> list[list[RoleFlip]]:
    """Every prompt of 4,001 tokens takes 4 s; each frontend gets so many a second."""
    said: list[list[RoleFlip]] = [[] for _ in conductors]
    told: set[str] = set()
    for second in range(seconds):
        now_s = float(second)
        for number, one in enumerate(conductors):
            reports = [report(name, is_draining=name in told) for name in WORKERS]
            one.on_events([WorkerReported(each) for each in reports], now_s)
            for asked in range(per_s):
                one.on_request(prompt(f"{number}-{second}-{asked}", prompt_tokens=4_001), now_s)
        for batch in [one.take_notes(now_s, 10_000) for one in conductors]:
            for one in conductors:
                one.on_routed_elsewhere(batch, now_s)
        for flips, one in zip(said, conductors, strict=True):
            one.on_tick(now_s)
            if (flip := one.propose_flip(now_s)) is not None:
                flips.append(flip)
                told |= {flip.worker.worker_id} if one.config.role_flips == "on" else set()
            one.check()
    return said


def test_prompts_beyond_what_prefill_can_do_bring_a_decode_worker_over() -> None:
    one = made("on")
    ((flip, *_),) = busy_prefill([one])
    assert flip.role == "prefill" and flip.worker.worker_id.startswith("d")
    stats = one.stats()
    assert stats.workers_wanted["prefill"] > 4.0 and stats.flips_proposed["prefill"] >= 1
    assert stats.flips_proposed["decode"] == 0


def test_a_worker_that_was_told_is_not_told_again() -> None:
    (flips,) = busy_prefill([made("on")])
    told = [flip.worker.worker_id for flip in flips]
    assert told and len(set(told)) == len(told)


def test_nothing_is_counted_or_said_while_it_is_off() -> None:
    one = made("off")
    assert busy_prefill([one], 30) == [[]]
    assert one.stats().workers_wanted == {} and one.stats().flips_proposed == {}


def test_a_dry_run_says_the_same_as_often_as_it_would_matter() -> None:
    one = made("dry_run")
    (flips,) = busy_prefill([one], 120)
    assert 2 <= len(flips) <= 4 and one.stats().flips_proposed["prefill"] == len(flips)


def test_of_several_frontends_one_proposes_and_it_knows_what_all_were_asked_for() -> None:
    three = [made("on", f"f{number}") for number in range(3)]
    said = busy_prefill(three, 60, per_s=1)
    assert sum(bool(flips) for flips in said) == 1
    wanted = [one.stats().workers_wanted["prefill"] for one in three]
    assert max(wanted) < 1.2 * min(wanted), wanted
