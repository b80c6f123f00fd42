"""The one client of all systems: `vllm bench serve --dataset-name timed_trace`.

The client sends token ids at the trace's own times and streams the answers. It makes the tokens of
a block from the hash of the block's id, so PYTHONHASHSEED is fixed. A request failed when its
status is not 200 (a rejection has 429) or its stream broke. The client never retries. Its results
are in the order of the trace.

Not here: judging the details (goodput.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.clients.environment import run_client
from bench.headline.goodput import RequestDetail
from bench.headline.traces import BLOCK_TOKENS, TraceRequest, to_lines

DRAIN_S_MAX = 300.0  # after the last request was sent
VARIABLES = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def send(
    vllm_bin: Path,
    checkpoint: Path,
    base_url: str,
    requests: Sequence[TraceRequest],
    folder: Path,
    at_once_max: int | None = None,
) -> list[RequestDetail]:
    """Details in the order of `requests`; raises ClientFailed. `folder` gets the client's
    files. A request waits, unmeasured, while `at_once_max` others run."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "trace.jsonl").write_text(to_lines(requests), "utf-8")
    run_s_max = requests[-1].at_s + DRAIN_S_MAX
    words = command(vllm_bin, checkpoint, base_url, len(requests))
    if at_once_max is not None:
        words += ["--max-concurrency", str(at_once_max)]
    run_client(words, folder, VARIABLES, run_s_max)
    return details(json.loads(result.read_text("utf-8")), requests)


def command(vllm_bin: Path, checkpoint: Path, base_url: str, requests: int) -> list[str]:
    """Runs in a folder with trace.jsonl; writes result.json there."""
    return [
        str(vllm_bin / "vllm"), "bench", "serve",
        "--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions",
        "--model", checkpoint.name, "--tokenizer", str(checkpoint),
        "--dataset-name", "timed_trace", "--dataset-path", "trace.jsonl",
        "--timed-trace-chunk-hash-size", str(BLOCK_TOKENS),
        "--num-prompts", str(requests), "--no-oversample",
        "--extra-body", json.dumps({"temperature": 0}), "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", ".", "--result-filename", "result.json",
    ]  # fmt: skip


def details(result: Mapping[str, Any], requests: Sequence[TraceRequest]) -> list[RequestDetail]:
    """The client's lists as one record for each request."""
    count = len(result["errors"])
    if count != len(requests):
        raise ValueError(f"the client reported {count} requests, {len(requests)} were sent")
    found = []
    for number, request in enumerate(requests):
        error = str(result["errors"][number]).strip()
        if not error and result["ttfts"][number] <= 0:
            error = "no answer"
        found.append(
            RequestDetail(
                prompt_tokens=request.prompt_tokens,
                wanted_tokens=request.output_tokens,
                output_tokens=int(result["output_lens"][number] or 0),
                ttft_s=float(result["ttfts"][number]),
                latency_s=float(result["latencies"][number]),
                itls_s=tuple(round(float(itl_s), 5) for itl_s in result["itls"][number]),
                error=error.splitlines()[-1][:200] if error else "",
            )
        )
    return found
