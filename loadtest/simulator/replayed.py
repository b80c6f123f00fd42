"""What would `mooncake replay` measure? A trace against a simulated fleet, request by request.

The result is the same kind of recording as a real replay's, with the same page. Several --speed,
--policy or --admission make several runs and the page of a sweep.

The conductor is the shipped one with the paper's service levels, which `--set` changes. Requests
are judged by its TTFT limit, and by a TBT limit a little above the conductor's step limit.

Not here: how a run becomes a recording (simulator/recorded_run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from conductor import ConductorConfig
from conductor.config import AUTO
from loadtest.results.digest import digest_of
from loadtest.results.metrics import Slo
from loadtest.results.recording import Recording, from_bytes, to_bytes
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NO_OPTIONS, Begin, Rows, SimulationOptions
from loadtest.simulator.recorded_run import FleetSampler, recording_of
from loadtest.simulator.runs import PlannedRun, run_all

TRACE = "conversation"
POLICY, ADMISSION = "adaptive", "predictive_lengths"
TTFT_SLO_S, TBT_SLO_S = 30.0, 0.1  # the paper's limits for its runs on real traces
# Limit for the predicted step, as a share of the TBT limit. A request's TBT is the mean of its
# longest intervals, so a batch held at the limit itself would miss it.
STEP_SHARE = 0.9
SHOWN = (
    "requests",
    "offered_per_s",
    "goodput_share",
    "rejected_share",
    "ttft_p90_s",
    "tbt_p90_s",
    "hit_rate",
)


def recordings(options: SimulationOptions, begin: Begin) -> list[Recording]:
    """Every speed with every policy and every admission that was asked for."""
    settings = options.settings()
    trace = options.one_trace(TRACE)
    source = options.source(trace)
    policies, admissions = options.policies or (POLICY,), options.admissions or (ADMISSION,)
    cases = list(product(policies, admissions, options.speeds or (1.0,)))
    for policy, admission, _ in cases:  # a wrong option fails before anything runs
        options.changed(config_for(policy, admission))
    planned = [
        PlannedRun(
            f"{policy} {speed:g}x",
            source,
            run,
            (trace, policy, admission, speed, settings, options.only_changes),
        )
        for policy, admission, speed in cases
    ]
    return [from_bytes(came) for came in run_all(planned, begin, options.jobs, options.kept)]


def config_for(policy: str, admission: str) -> ConductorConfig:
    return ConductorConfig(
        policy=policy,
        admission=admission,
        advisory=admission == "none",
        ttft_slo_s=TTFT_SLO_S,
        tbt_slo_s=STEP_SHARE * TBT_SLO_S,
    )


def run(
    offered: Sequence[Offered],
    trace: str,
    policy: str,
    admission: str,
    speed: float,
    settings: ClusterSettings,
    options: SimulationOptions = NO_OPTIONS,
    on_over: Callable[[], None] = lambda: None,
) -> bytes:
    config = options.changed(config_for(policy, admission))
    fleet = SimulatedFleet(config, settings, settings.gpu())
    sampler = FleetSampler(offered[-1].at_s / speed)
    fleet.reported = sampler.look
    jobs = fleet.run(offered, speed, on_over)
    described = {
        "trace": f"{trace}_trace.jsonl",
        "speed": speed,
        "requests_max": len(offered),
        "nodes": settings.prefills + settings.decodes,
        "prefills": settings.prefills,
        "decodes": settings.decodes,
        "node_blocks": settings.node_blocks,
        "policy": config.policy,
        "admission": config.admission,
        "seed": settings.seed,
        **{change.partition("=")[0]: change.partition("=")[2] for change in options.changes},
    }
    title = (
        f"Simulated: {trace} at {speed:g}x to {settings.prefills} + {settings.decodes} nodes, "
        f"{config.policy}, {config.admission}"
    )
    ttft_s = TTFT_SLO_S if config.ttft_slo_s == AUTO else config.ttft_slo_s
    tbt_s = STEP_SHARE * TBT_SLO_S if config.tbt_slo_s == AUTO else config.tbt_slo_s
    slo = Slo(ttft_s, round(tbt_s / STEP_SHARE, 6))
    return to_bytes(recording_of(jobs, "simulate", title, described, slo, sampler.samples))


def label_of(run: Recording) -> str:
    return "{policy}, {admission}, {speed:g}x".format(**run.settings)


def rows_of(runs: Sequence[Recording]) -> Rows:
    rows: Rows = []
    for one in runs:
        found = digest_of(one).numbers
        named = {name: one.settings[name] for name in ("policy", "admission", "speed")}
        values = {name: found[name] for name in SHOWN}
        rows.append(named | {n: v if v is None else round(v, 5) for n, v in values.items()})
    return rows
