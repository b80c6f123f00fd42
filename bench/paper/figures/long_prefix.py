"""How much does a cached prefix save a long prompt? FAST'25, Figure 14.

One prompt alone, of 8k to 128k tokens, with nothing and with 95 % of it cached: in the DRAM of the
prefill worker's own node, and on another node. It reads no trace and has no randomness. Targets, at
128k: the prefill takes at least 90 % less, the first token comes at least 86 % sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.paper.experiments.scheduling import config_for
from loadtest.harness.result import Target
from loadtest.simulator.block_cache import key_of
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions

LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
CACHED_SHARE = 0.95
LATER_S = 600.0  # the first prompt has ended by then
PAPER_PREFILL_S = {8_192: 1.0, 16_384: 2.0, 32_768: 4.5, 65_536: 10.5, 131_072: 27.5}
PAPER_LESS = {"prefill": 0.92, "ttft": 0.86}  # at 128k
PREFILL_LESS_MIN, TTFT_LESS_MIN = 0.90, 0.86
WHERE = ("nowhere", "own node", "another node")


@dataclass(frozen=True, slots=True)
class LongPrompt:
    tokens: int
    where: str
    prefill_s: float
    ttft_s: float


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every length, cached and not."""
    done = begin("prompts", len(LENGTHS) * len(WHERE))
    found = []
    for tokens in LENGTHS:
        for where in WHERE:
            found.append(run(tokens, where, options))
            done()
    return rows_of(found), targets_of(found)


def run(tokens: int, where: str, options: SimulationOptions) -> LongPrompt:
    shape = replace(options.settings(), prefills=1, decodes=1, jitter=0.0)
    block_tokens = shape.block_tokens
    cached = 0 if where == "nowhere" else int(CACHED_SHARE * tokens / block_tokens)
    keys = [key_of(block) for block in range(tokens // block_tokens)]
    fleet = SimulatedFleet(options.changed(config_for("kvcache_centric")), shape, Roofline())
    offered = [Offered(1, LATER_S, tokens, 2, keys)]
    if where == "own node":  # the prefix comes first, as a prompt of its own
        offered.insert(0, Offered(0, 0.0, cached * block_tokens, 1, keys[:cached]))
    elif where == "another node":
        fleet.site.store.put(keys[:cached], fleet.decodes["d0"].node_id, "before")
        fleet.site.store.release("before")
    job = fleet.run(offered)[-1]
    assert job.cached_tokens == cached * block_tokens, (where, job.cached_tokens)
    return long_prompt(job, where)


def long_prompt(job: SimulatedJob, where: str) -> LongPrompt:
    return LongPrompt(job.prompt_tokens, where, job.own_compute_s, job.ttft_s)


def less(found: Sequence[LongPrompt], prompt: LongPrompt) -> tuple[float, float]:
    """The shares by which prefill and TTFT are below those of the same prompt without a cache."""
    bare = next(o for o in found if (o.tokens, o.where) == (prompt.tokens, "nowhere"))
    return 1 - prompt.prefill_s / bare.prefill_s, 1 - prompt.ttft_s / bare.ttft_s


def rows_of(found: Sequence[LongPrompt]) -> Rows:
    rows: Rows = []
    for prompt in found:
        prefill_less, ttft_less = less(found, prompt)
        is_bare, is_longest = prompt.where == "nowhere", prompt.tokens == LENGTHS[-1]
        is_paper_s = not is_bare and is_longest
        rows.append(
            {
                "prompt_tokens": prompt.tokens,
                "cached": prompt.where,
                "prefill_s": round(prompt.prefill_s, 3),
                "paper_prefill_s": PAPER_PREFILL_S[prompt.tokens] if is_bare else None,
                "ttft_s": round(prompt.ttft_s, 3),
                "prefill_less_percent": round(100 * prefill_less, 1),
                "paper_prefill_less_percent": 100 * PAPER_LESS["prefill"] if is_paper_s else None,
                "ttft_less_percent": round(100 * ttft_less, 1),
                "paper_ttft_less_percent": 100 * PAPER_LESS["ttft"] if is_paper_s else None,
            }
        )
    return rows


def targets_of(found: Sequence[LongPrompt]) -> list[Target]:
    targets = []
    for where in WHERE[1:]:
        longest = next(o for o in found if (o.tokens, o.where) == (LENGTHS[-1], where))
        for name, value, goal in zip(
            ("prefill", "TTFT"),
            less(found, longest),
            (PREFILL_LESS_MIN, TTFT_LESS_MIN),
            strict=True,
        ):
            what = f"128k tokens, 95 % cached on {where}: {name} is less by"
            targets.append(Target(what, round(value, 4), ">=", goal))
    return targets
