"""How long one decision takes: `python -m tests.conductor.decision_speed`.

Half of the workers prefill, half decode, two to a node; every node holds another share of one
prompt, so each prefill worker has its own local prefix and every fetch its own sender; each worker
has a few requests in flight. Times are of `on_request` alone, in microseconds. The last line is
one JSON object.
"""

from __future__ import annotations

import json
import time

from conductor import Route
from mooncake_store.events import BlockAdded, WorkerReported
from tests.conductor.fleet import BLOCK_TOKENS, conductor, fleet, keys, prompt, report

DECISIONS, WARM_UP = 2_000, 200


def decision_us(workers: int, blocks: int) -> tuple[float, float]:
    """(median, 99th percentile)."""
    half, chain = workers // 2, keys(f"a*{blocks}")
    made = conductor(fleet(half, half, half))
    for number in range(half):
        held = chain[: blocks * (number + 1) // half]
        made.on_events([BlockAdded(key, f"s{number}") for key in held], 0.0)
    names, live, times = [f"{r}{n}" for n in range(half) for r in "pd"], [], []
    request = prompt("", f"a*{blocks}", blocks * BLOCK_TOKENS + 1)
    for number in range(DECISIONS + WARM_UP):
        now_s = number * 0.01
        if number % 100 == 0:
            made.on_events([WorkerReported(report(name)) for name in names], now_s)
            made.on_tick(now_s)
        asked = type(request)(f"r{number}", request.prompt_tokens, chain, request.output_tokens_max)
        began = time.perf_counter()
        decision = made.on_request(asked, now_s)
        times.append((time.perf_counter() - began) * 1e6)
        assert isinstance(decision, Route), decision
        live.append(asked.request_id)
        if len(live) > 3 * half:
            oldest = live.pop(0)
            made.on_prefill_finished(oldest, now_s, 0, 0.1)
            made.on_finished(oldest, now_s)
    ordered = sorted(times[WARM_UP:])
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def main() -> None:
    rows = []
    for workers in (4, 8, 64):
        for blocks in (14, 247):
            median, p99 = decision_us(workers, blocks)
            print(f"{workers:3} workers, {blocks:3} blocks: {median:4.0f} us, p99 {p99:4.0f} us")
            rows.append({"workers": workers, "blocks": blocks, "us": median, "us_p99": p99})
    print(json.dumps({"name": "decision_speed", "rows": rows}))


if __name__ == "__main__":
    main()
