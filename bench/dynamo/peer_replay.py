"""Dynamo's own replay, run by a peer's Python: a line of stdin is a run, its result a JSON line.

    python -m venv DIR && DIR/bin/pip install ai-dynamo-runtime==1.6.1
    echo '{"trace": FILE, "blocks": 2048, "speed": 1.0, "mode": "round_robin",
           "prefills": 2, "decodes": 2}' | DIR/bin/python peer_replay.py

`router` in a run holds arguments of Dynamo's KvRouterConfig. All other settings are the mocker's
defaults. A line has every request with its times, and Dynamo's own figures, with which the reader
checks its interpretation. It imports nothing of this project.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from typing import Any

BLOCK_TOKENS = 512
SUMMARY = ("mean_ttft_ms", "max_ttft_ms", "mean_tpot_ms", "goodput_completed_requests")
REQUEST = (
    "arrival_time_ms",
    "input_length",
    "output_length",
    "first_token_ms",
    "last_token_ms",
    "source_held_ms",
    "reused_input_tokens",
)


def replay(core: Any, run: dict[str, Any]) -> dict[str, Any]:
    def engine(role: str) -> Any:
        return core._normalize_mocker_config(
            {
                "engine": {
                    "worker_type": role,
                    "block_size": BLOCK_TOKENS,
                    "num_gpu_blocks": run["blocks"],
                }
            }
        )

    router = {"router_config": core.KvRouterConfig(**run["router"])} if run.get("router") else {}
    found = core.run_mocker_trace_replay(
        [run["trace"]],
        trace_block_size=BLOCK_TOKENS,
        sla_ttft_ms=30_000.0,
        sla_itl_ms=100.0,
        prefill_engine_args=engine("prefill"),
        decode_engine_args=engine("decode"),
        num_prefill_workers=run["prefills"],
        num_decode_workers=run["decodes"],
        router_mode=run["mode"],
        arrival_speedup_ratio=run["speed"],
        capture_per_request=True,
        **router,
    )
    return {
        "summary": {name: found.summary[name] for name in SUMMARY},
        "requests": [[request[name] for name in REQUEST] for request in found.per_request],
    }


def main() -> None:
    core = importlib.import_module("dynamo._core")
    version = importlib.metadata.version("ai-dynamo-runtime")
    for line in sys.stdin:
        found = {**replay(core, json.loads(line)), "version": version}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
