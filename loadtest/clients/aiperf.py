"""NVIDIA aiperf against Triton's `generate_stream`: its template endpoint, and trace replay.

aiperf speaks HTTP only and has no endpoint type for Triton; its `template` endpoint sends whatever
JSON a template makes. Not here: installing (environment.py), scaling a trace (scaled_trace.py).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from loadtest.clients import hub_cache
from loadtest.clients.environment import ClientFailed
from loadtest.clients.load import Load, Report
from loadtest.clients.process import run_client

NAME = "aiperf"
REQUIREMENTS = ("aiperf==0.13.0",)
RUN_S_MAX = 300.0
# min_tokens makes answers as long as they were asked to be, whatever is generated.
TEMPLATE = (
    '{"text_input": {{ text|tojson }}, "max_tokens": {{ max_tokens or 16 }}, '
    '"min_tokens": {{ max_tokens or 16 }}, "stream": true}'
)
EXPORT = "profile_export_aiperf.json"
CONSOLE = "profile_export_console.txt"
TABLE_TITLE = "NVIDIA AIPerf | LLM Metrics"


def arguments(load: Load, model: str, folder: Path, trace: Path | None) -> list[str]:
    """Of `aiperf profile`; with `trace`, prompts and times are the trace's."""
    common = [
        "profile", "--model", model, "--url", f"http://{load.addresses.http}",
        "--endpoint-type", "template",
        "--custom-endpoint", f"/v2/models/{model}/generate_stream", "--streaming",
        "--extra-inputs", f"payload_template:{folder / 'template.jinja'}",
        "--extra-inputs", "response_field:text_output",
        "--tokenizer", hub_cache.NAME, "--artifact-dir", str(folder), "--ui", "none",
        "--no-gpu-telemetry", "--no-server-metrics",
        # It starts a process per core and kind otherwise, on cores that the server wants too, and
        # each begins with a slow request: its own imports and connection.
        "--workers-max", str(1 if load.concurrency == 1 else 2),
        "--record-processor-service-count", "1",
        # Without one, a hash id is the same text in every run: the second run would be cached.
        "--random-seed", str(secrets.randbits(31)),
    ]  # fmt: skip
    if trace is not None:
        return [
            *common, "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace",
            "--fixed-schedule", "--fixed-schedule-auto-offset",
        ]  # fmt: skip
    return [
        *common, "--isl", str(load.input_tokens), "--osl", str(load.output_tokens),
        "--concurrency", str(load.concurrency), "--request-count", str(load.requests),
    ]  # fmt: skip


def run(
    binaries: Path, load: Load, model: str, folder: Path, trace: Path | None, more: Sequence[str]
) -> Report:
    """One run, its files in `folder`; `more` are further arguments. Raises ClientFailed."""
    folder.mkdir(parents=True)
    (folder / "template.jinja").write_text(TEMPLATE)
    command = [str(binaries / "aiperf"), *arguments(load, model, folder, trace), *more]
    variables = hub_cache.lay_out(load.tokenizer, folder / "huggingface") | {"COLUMNS": "100"}
    run_client(command, folder, RUN_S_MAX, variables)
    return read_report(folder, model, "trace" if trace else "synthetic")


def read_report(folder: Path, model: str, workload: str) -> Report:
    """aiperf's own export; requests that failed are an error, not a smaller number."""
    found = json.loads((folder / EXPORT).read_text())
    if errors := found.get("error_summary"):
        raise ClientFailed(f"aiperf had errors: {json.dumps(errors)[:1_000]}")
    ttft = found["time_to_first_token"]
    return Report(
        NAME,
        model,
        workload,
        int(found["request_count"]["avg"]),
        ttft["avg"],
        ttft["p50"],
        last_table((folder / CONSOLE).read_text()),
    )


def last_table(console: str) -> str:
    """The table of latencies; before it stand two of throughput over time."""
    _, _, after = console.rpartition(TABLE_TITLE + " ")
    table, _, _ = after.partition("╭")
    return f"{TABLE_TITLE}\n{table.strip()}"
