"""Run by a peer's Python: Dynamo's own replay, one JSON line for each run that stdin asks for.

    python -m venv DIR && DIR/bin/pip install ai-dynamo-runtime==1.6.1
    echo '[{"trace": FILE, "blocks": 2048, "speed": 1.0, "mode": "round_robin"}]' |
        DIR/bin/python peer_replay.py

`router` in a run holds arguments of Dynamo's KvRouterConfig. Two prefill and two decode workers,
all else as the mocker has it by default. It imports nothing of this project.

Not here: which runs (peer.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from typing import Any

BLOCK_TOKENS = 512
FIELDS = {
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p90_ms": "p90_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "ttft_max_ms": "max_ttft_ms",
    "itl_mean_ms": "mean_tpot_ms",
    "reuse": "prefix_cache_reused_ratio",
    "requests": "completed_requests",
    "good": "goodput_completed_requests",
    "good_tokens_per_s": "goodput_output_throughput_tok_s",
}


def replay(core: Any, run: dict[str, Any]) -> dict[str, Any]:
    def engine(role: str) -> Any:
        return core._normalize_mocker_config({
            "engine": {
                "worker_type": role,
                "block_size": BLOCK_TOKENS,
                "num_gpu_blocks": run["blocks"],
            }
        })  # fmt: skip

    router = {"router_config": core.KvRouterConfig(**run["router"])} if run.get("router") else {}
    summary = core.run_mocker_trace_replay(
        [run["trace"]], trace_block_size=BLOCK_TOKENS, sla_ttft_ms=30_000.0, sla_itl_ms=100.0,
        prefill_engine_args=engine("prefill"), decode_engine_args=engine("decode"),
        num_prefill_workers=2, num_decode_workers=2, router_mode=run["mode"],
        arrival_speedup_ratio=run["speed"], **router,
    ).summary  # fmt: skip
    return {ours: round(summary[theirs], 6) for ours, theirs in FIELDS.items()}


def main() -> None:
    core = importlib.import_module("dynamo._core")
    version = importlib.metadata.version("ai-dynamo-runtime")
    for run in json.load(sys.stdin):
        print(json.dumps({**replay(core, run), "version": version}), flush=True)


if __name__ == "__main__":
    main()
