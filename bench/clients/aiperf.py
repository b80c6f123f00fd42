"""NVIDIA aiperf: Triton's `generate_stream`, trace replay, and the gateway's chat.

aiperf supports HTTP only and has no endpoint type for Triton; its `template` endpoint sends any
JSON that a template makes. It has an endpoint type for OpenAI's interface. Version 0.13 cannot use
a tokenizer's folder with traces of ten or more requests: its decoding processes go offline and then
take every name for one of the hub (its pull request 1339). A name in the Hugging Face cache works
offline, so the folder is laid out as in the cache after a download.

Not here: installing (environment.py), scaling a trace (replay.py).
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from bench.clients.agreement import GATEWAY, ClientLoad, ClientReport
from bench.clients.environment import ClientFailed, flags, run_client
from bench.clients.replay import ScaledTrace

NAME = "aiperf"
REQUIREMENTS = ("aiperf==0.13.0",)
# min_tokens makes answers as long as requested, whatever is generated.
TEMPLATE = (
    '{"text_input": {{ text|tojson }}, "max_tokens": {{ max_tokens or 16 }}, '
    '"min_tokens": {{ max_tokens or 16 }}, "stream": true}'
)
EXPORT = "profile_export_aiperf.json"
CONSOLE = "profile_export_console.txt"
TABLE_TITLE = "NVIDIA AIPerf | LLM Metrics"
CACHED_TOKENIZER = "served/tokenizer"
REVISION = "0" * 40  # the cache names a snapshot by its commit


def arguments(load: ClientLoad, model: str, folder: Path, trace: Path | None) -> list[str]:
    """Arguments of `aiperf profile`; with `trace`, prompts and times are the trace's."""
    asked = [
        "profile",
        *flags(
            model=model,
            url=f"http://{load.addresses.http}",
            endpoint_type="template",
            custom_endpoint=f"/v2/models/{model}/generate_stream",
        ),
        *flags(extra_inputs=f"payload_template:{folder / 'template.jinja'}"),
        *flags(extra_inputs="response_field:text_output"),
        *common(load, folder),
    ]
    if trace is not None:
        traced = flags(input_file=trace, custom_dataset_type="mooncake_trace")
        return [*asked, *traced, "--fixed-schedule", "--fixed-schedule-auto-offset"]
    return [*asked, *synthetic(load)]


def chat_arguments(load: ClientLoad, folder: Path, counts_by_server: bool) -> list[str]:
    """Arguments for the gateway, with the endpoint type for OpenAI's chat."""
    server = load.gateway
    assert server is not None, "no gateway was named"
    found = [
        "profile",
        *flags(model=server.model, url=server.url.removesuffix("/v1"), endpoint_type="chat"),
        *flags(api_key=server.key, extra_inputs="ignore_eos:true"),
        *common(load, folder),
        *synthetic(load),
    ]
    return [*found, "--use-server-token-count", "--per-chunk-usage"] if counts_by_server else found


def common(load: ClientLoad, folder: Path) -> list[str]:
    return [
        *("--streaming", "--no-gpu-telemetry", "--no-server-metrics"),
        *flags(tokenizer=CACHED_TOKENIZER, artifact_dir=folder, ui="none"),
        # It would start a process per core and kind, on the server's cores, and each begins with a
        # slow request because of its imports and connection.
        *flags(workers_max=1 if load.concurrency == 1 else 2, record_processor_service_count=1),
        # Without it, a hash id is the same text in every run: the second run would be cached.
        *flags(random_seed=secrets.randbits(31)),
    ]


def synthetic(load: ClientLoad) -> list[str]:
    lengths = flags(isl=load.input_tokens, osl=load.output_tokens)
    return [*lengths, *flags(concurrency=load.concurrency, request_count=load.requests)]


def run_chat(
    binaries: Path, load: ClientLoad, folder: Path, counts_by_server: bool
) -> ClientReport:
    """One run through the gateway, its files in `folder`; raises ClientFailed."""
    folder.mkdir(parents=True)
    command = [str(binaries / NAME), *chat_arguments(load, folder, counts_by_server)]
    run_client(command, folder, lay_out_cache(load.tokenizer, folder / "huggingface"))
    workload = "server's counts" if counts_by_server else "synthetic"
    return read_report(folder, GATEWAY, f"{workload}, {load.concurrency} at a time")


def run(
    binaries: Path, load: ClientLoad, model: str, folder: Path, trace: ScaledTrace | None = None
) -> ClientReport:
    """One run, its files in `folder`; raises ClientFailed."""
    folder.mkdir(parents=True)
    (folder / "template.jinja").write_text(TEMPLATE)
    program = str(binaries / NAME)
    if trace is None:
        command = [program, *arguments(load, model, folder, None)]
    else:
        scaled = folder / "trace.jsonl"
        block_tokens = trace.write(scaled)
        command = [program, *arguments(load, model, folder, scaled)]
        command += ["--isl-block-size", str(block_tokens)]
    run_client(command, folder, lay_out_cache(load.tokenizer, folder / "huggingface"))
    return read_report(folder, model, "trace" if trace else "synthetic")


def lay_out_cache(tokenizer: Path, home: Path) -> dict[str, str]:
    """Makes the cache in `home`; returns the variables under which CACHED_TOKENIZER is
    `tokenizer`.
    """
    repository = home / "hub" / f"models--{CACHED_TOKENIZER.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / REVISION).symlink_to(tokenizer.resolve())
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def read_report(folder: Path, model: str, workload: str) -> ClientReport:
    """aiperf's own export; failed requests are an error, not a smaller number."""
    found = json.loads((folder / EXPORT).read_text())
    if errors := found.get("error_summary"):
        raise ClientFailed(f"aiperf had errors: {json.dumps(errors)[:1_000]}")
    table = last_table((folder / CONSOLE).read_text())
    return ClientReport.of_export(NAME, model, workload, found, table)


def last_table(console: str) -> str:
    """The table of latencies; two tables of throughput over time come before it."""
    _, _, after = console.rpartition(TABLE_TITLE + " ")
    table, _, _ = after.partition("╭")
    return f"{TABLE_TITLE}\n{table.strip()}"
