"""Every metric of this project on the metrics page of `mooncake serve`: name, kind, unit, meaning.

A Triton model that publishes another name, label or label value fails (backends/metrics/page.py).
docs/metrics.md is printed from this table (tools/metric_docs.py).

Names follow Prometheus: base units (`_seconds`, `_bytes`), and `_total` at the end of a counter. A
series that a Triton model publishes also has the label `model`, the model's name. Pure.
Not here: where a number comes from (backends/frontend/metrics.py, backends/workers/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
FRONTEND, PREFILL, DECODE = "conductor", "prefill", "decode"  # Triton backends of the publishers
GATEWAY = "gateway"  # no Triton backend: the gateway processes (`mooncake serve --openai-port`)
WORKERS = (PREFILL, DECODE)

# Upper bounds of histogram buckets. Each bound is 1.25 to 2 times the previous bound, so an
# interpolated percentile between 0.5 ms and 120 s is wrong by at most a factor of 2.
SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0,
)  # fmt: skip
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)

OUTCOMES = (
    "answered", "rejected", "invalid_request", "forbidden", "unavailable", "kv_missing",
    "cancelled", "internal_error",
)  # fmt: skip
REASONS = (
    "ttft_slo", "tbt_slo", "prefill_full", "decode_full", "too_large", "no_prefill_worker",
    "no_decode_worker", "fair_share", "front_full", "prefill_queue_full", "decode_queue_full",
    "decode_overload", "store_full", "tenant_full", "request_rate", "token_rate", "other",
)  # fmt: skip
TENANT_REASONS = ("request_rate", "token_rate", "tenant_full", "too_large", "other")
NOTE_RESULTS = ("sent", "unsent", "received", "missed")
RECORDING_RESULTS = ("written", "dropped")
SPAN_RESULTS = ("exported", "lost")


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric. `values` lists the allowed values; () allows any value."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    unit: str  # a Prometheus base unit, or what is counted; "1": no unit
    publishers: tuple[str, ...]  # backends whose models publish the metric, or GATEWAY
    meaning: str  # HELP text on the metrics page
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds in `unit`; () except for a histogram
    is_use: bool = False  # True for a gauge that returns to 0 when the load ends

    def series_labels(self) -> Iterator[dict[str, str]]:
        """Every combination of the allowed label values; none if a label allows any value."""
        found: list[dict[str, str]] = [{}]
        for label in self.labels:
            found = [{**labels, label.name: value} for labels in found for value in label.values]
        yield from found


def counter(
    name: str, unit: str, publishers: tuple[str, ...], meaning: str, *labels: Label
) -> Metric:
    assert name.endswith("_total"), name
    return Metric(name, "counter", unit, publishers, meaning, labels)


def gauge(
    name: str,
    unit: str,
    publishers: tuple[str, ...],
    meaning: str,
    *labels: Label,
    is_use: bool = False,
) -> Metric:
    return Metric(name, "gauge", unit, publishers, meaning, labels, is_use=is_use)


def seconds(name: str, publisher: str, meaning: str) -> Metric:
    assert name.endswith("_seconds"), name
    return Metric(name, "histogram", "seconds", (publisher,), meaning, buckets=SECONDS)


def ratio(name: str, publisher: str, meaning: str) -> Metric:
    assert name.endswith("_ratio"), name
    return Metric(name, "histogram", "ratio", (publisher,), meaning, buckets=RATIOS)


NODE = Label("node")
TENANT = Label("tenant")  # a tenant in the file of API keys, or "(others)"
HEAT = Label("heat", ("1", "2", "4", "8"))  # least hit rate of a block, in units of hot_hits_per_s
PREDICTION = Label("kind", ("predicted", "actual"))
NIC = Label("nic")
TRANSPORT = Label("transport", ("mapped", "nixl", "tcp"))

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Requests": (
        gauge("mooncake_requests_live", "requests", (FRONTEND,),
              "Requests between arrival and answer.", is_use=True),
        counter("mooncake_requests_total", "requests", (FRONTEND,),
                "Requests that ended: answered, or by the first word of their error.",
                Label("outcome", OUTCOMES)),
        counter("mooncake_requests_within_slo_total", "requests", (FRONTEND,),
                "Answered requests that met both limits of mooncake_slo_seconds, TTFT and (streams "
                "with more than one token) TBT: goodput."),
        counter("mooncake_rejections_total", "requests", (FRONTEND,),
                "Requests rejected on purpose, by the `kind` that their clients read.",
                Label("reason", REASONS)),
        counter("mooncake_wasted_prefills_total", "requests", (FRONTEND,),
                "Requests that their decode worker refused, after their prefill was computed."),
        counter("mooncake_wasted_prefill_seconds_total", "seconds", (FRONTEND,),
                "Time that the prefills of mooncake_wasted_prefills_total took."),
        counter("mooncake_routed_total", "attempts", (FRONTEND,),
                "Attempts of requests that were given to a pair of workers."),
        counter("mooncake_retries_total", "attempts", (FRONTEND,),
                "Further attempts, after a worker was lost or KV had left the store."),
        counter("mooncake_fetches_total", "attempts", (FRONTEND,),
                "Attempts whose prefix was to be fetched from another node (Algorithm 1)."),
        counter("mooncake_replicated_blocks_total", "blocks", (FRONTEND,),
                "Blocks of hot prefixes that a node was asked to copy."),
        gauge("mooncake_hot_blocks", "blocks", (FRONTEND,),
              "Blocks by their hits from requests of this frontend, at most 2,048. heat 2: 2 to 4 "
              "times hot_hits_per_s. Hits fade by half in hot_half_life_s.", HEAT),
        gauge("mooncake_hot_block_copies", "copies", (FRONTEND,),
              "Copies in DRAM of the blocks of mooncake_hot_blocks, over all nodes.", HEAT),
        gauge("mooncake_workers_wanted", "workers", (FRONTEND,),
              "Workers of a role that the load needs to keep both limits (role_flips).",
              Label("role")),
        counter("mooncake_role_flips_proposed_total", "flips", (FRONTEND,),
                "Workers that should take this role; a dry run sends them no order.",
                Label("role")),
        gauge("mooncake_frontends_known", "frontends", (FRONTEND,),
              "Other frontends of this deployment that sent a message lately."),
        gauge("mooncake_routed_elsewhere", "requests", (FRONTEND,),
              "Requests of other frontends whose reported work is reserved here.",
              is_use=True),
        counter("mooncake_routing_note_batches_total", "batches", (FRONTEND,),
                "Notes to and of other frontends about what they routed. unsent: the directory did "
                "not accept them; missed: they never arrived, and worker reports replace them.",
                Label("result", NOTE_RESULTS)),
        counter("mooncake_recorded_requests_total", "requests", (FRONTEND,),
                "Requests of the recording (recording_folder). dropped: the disk was full, gone or "
                "too slow; the requests themselves were served.",
                Label("result", RECORDING_RESULTS)),
        counter("mooncake_trace_spans_total", "spans", (FRONTEND,),
                "Spans of traced requests. lost: the collector did not accept them, or the queue "
                "was full; the requests themselves were served.",
                Label("result", SPAN_RESULTS)),
    ),
    "Tenants, with API keys": (
        counter("mooncake_tenant_requests_total", "requests", (FRONTEND,),
                "Requests of a tenant that ended, by outcome. The first 64 tenants that ask have "
                "series of their own, later ones share `(others)`.",
                TENANT, Label("outcome", OUTCOMES)),
        counter("mooncake_tenant_rejections_total", "requests", (FRONTEND,),
                "Requests of a tenant that were rejected, for a limit of the tenant or another "
                "reason.", TENANT, Label("reason", TENANT_REASONS)),
        counter("mooncake_tenant_tokens_total", "tokens", (FRONTEND,),
                "Tokens of a tenant: prompts, what of them was cached, answers.",
                TENANT, Label("kind", ("prompt", "cached", "output"))),
        gauge("mooncake_tenant_requests_live", "requests", (FRONTEND,),
              "Requests of a tenant between arrival and answer.", TENANT, is_use=True),
    ),
    "Latency": (
        gauge("mooncake_slo_seconds", "seconds", (FRONTEND,),
              "The limits that requests are admitted by, and goodput is counted by: ttft_slo_s and "
              "tbt_slo_s of the conductor.", Label("limit", ("ttft", "tbt"))),
        seconds("mooncake_ttft_seconds", FRONTEND,
                "Time to first token: from the arrival of a request until the frontend has its "
                "first token, parsing and tokenising included."),
        seconds("mooncake_tbt_seconds", FRONTEND,
                "Time between tokens of a streamed answer: the mean of the longest 10 % of its "
                "intervals, as in FAST'25. One value per request."),
        counter("mooncake_token_intervals_total", "intervals", (FRONTEND,),
                "Intervals between tokens of streamed answers."),
        counter("mooncake_token_interval_seconds_total", "seconds", (FRONTEND,),
                "Sum of these intervals; divided by their number, the mean time per token."),
        seconds("mooncake_request_duration_seconds", FRONTEND,
                "Answered requests, from arrival to the last token."),
        ratio("mooncake_ttft_prediction_error_ratio", FRONTEND,
              "abs(predicted - actual) / actual of the time from the conductor's decision to the "
              "end of prefill. One value per attempt."),
        ratio("mooncake_tbt_prediction_error_ratio", FRONTEND,
              "abs(predicted - actual) / actual of the TBT of a streamed answer."),
        counter("mooncake_ttft_prediction_seconds_total", "seconds", (FRONTEND,),
                "The times of which mooncake_ttft_prediction_error_ratio has the errors, added up: "
                "predicted / actual says in which direction the conductor errs.", PREDICTION),
        counter("mooncake_tbt_prediction_seconds_total", "seconds", (FRONTEND,),
                "The same of mooncake_tbt_prediction_error_ratio.", PREDICTION),
    ),
    "Where the time goes": (
        seconds("mooncake_prefill_queue_seconds", PREFILL,
                "A prompt's waiting at its prefill worker, all of it."),
        seconds("mooncake_prefix_load_seconds", PREFILL,
                "Bringing a cached prefix into the pages, fetching from another node included. "
                "Only prompts that had one."),
        seconds("mooncake_prefill_compute_seconds", PREFILL,
                "The steps that computed a prompt."),
        seconds("mooncake_handover_put_seconds", PREFILL,
                "From the last step of a prompt until all its KV is committed in the store."),
        seconds("mooncake_decode_queue_seconds", DECODE,
                "From the arrival of a request at its decode worker until it has pages and what "
                "is missing of its KV begins to be read."),
        seconds("mooncake_handover_load_seconds", DECODE,
                "Reading the missing KV of such a request."),
        counter("mooncake_decode_preemptions_total", "requests", (DECODE,),
                "Running requests whose pages went to one of higher priority; they resume from the "
                "store."),
    ),
    "Tokens": (
        counter("mooncake_prompt_tokens_total", "tokens", (PREFILL,),
                "Prompt tokens by how their KV came: computed, local (cached in the worker's "
                "node), fetched (from another node).",
                Label("path", ("computed", "local", "fetched"))),
        counter("mooncake_aborted_prefill_tokens_total", "tokens", (PREFILL,),
                "Prompt tokens computed for requests that then left without a first token: "
                "cancelled, or failed. Not in mooncake_prompt_tokens_total. Engine torch only."),
        counter("mooncake_handover_tokens_total", "tokens", (DECODE,),
                "With engine tensorrt_llm: tokens of requests that came to decode, by how their "
                "KV got into the engine: loaded (handed over), local (it still had it), computed "
                "(the end of the last page, and whatever was not there).",
                Label("path", ("loaded", "local", "computed"))),
        counter("mooncake_output_tokens_total", "tokens", WORKERS,
                "Tokens generated: the first of each prompt by prefill, the others by decode."),
    ),
    "Workers": (
        gauge("mooncake_worker_info", "1", WORKERS,
              "1; the labels say what the worker is: role, storage node, layout of its KV.",
              Label("role"), NODE, Label("fingerprint"), Label("block_tokens")),
        gauge("mooncake_start_time_seconds", "seconds", (FRONTEND, *WORKERS),
              "When the model's process started, in Unix time."),
        gauge("mooncake_workers_live", "workers", (FRONTEND,),
              "Workers that the conductor may choose from.",
              Label("role", ("prefill", "decode"))),
        gauge("mooncake_worker_unreached", "1", (FRONTEND,),
              "1 while this frontend cannot call the worker, until a probe reaches the worker. "
              "refused: keys or certificates; cut_off: no connection.",
              Label("worker"), Label("cause", ("refused", "cut_off")), is_use=True),
        gauge("mooncake_requests_waiting", "requests", WORKERS,
              "Accepted and not running: prefill: without pages; decode: not in the batch yet.",
              is_use=True),
        gauge("mooncake_requests_running", "requests", WORKERS,
              "prefill: with pages; decode: in the running batch.", is_use=True),
        gauge("mooncake_queue_tokens", "tokens", (PREFILL,),
              "Prompt tokens not computed yet, cached ones included until they are loaded.",
              is_use=True),
        gauge("mooncake_context_tokens", "tokens", (DECODE,),
              "KV tokens that the next step of the running batch reads.", is_use=True),
        counter("mooncake_steps_total", "steps", WORKERS, "Steps of the engine."),
        counter("mooncake_step_seconds_total", "seconds", WORKERS,
                "Time of these steps: divided by their number, the mean step; as a rate, how busy "
                "the engine is."),
        gauge("mooncake_step_age_seconds", "seconds", WORKERS,
              "How long the engine's current step has run; 0 between steps. A worker whose step "
              "does not end deregisters, and its process restarts."),
        gauge("mooncake_pages_used", "pages", WORKERS,
              "Pages of KV memory taken: reserved, not necessarily full.", is_use=True),
        gauge("mooncake_pages_max", "pages", WORKERS, "Pages of KV memory."),
        gauge("mooncake_kv_bytes_used", "bytes", WORKERS, "The taken pages in bytes.",
              is_use=True),
        gauge("mooncake_kv_bytes_max", "bytes", WORKERS, "The engine's KV memory."),
        counter("mooncake_kv_occupation_byte_seconds_total", "byte seconds", WORKERS,
                "VRAM occupation cost: taken bytes times the seconds that they stay taken, "
                "counted at each taking and giving back."),
        gauge("mooncake_leases_held", "requests", WORKERS,
              "Requests whose blocks in the store this worker keeps leased.", is_use=True),
        counter("mooncake_self_checks_total", "checks", (FRONTEND, *WORKERS),
                "Self-checks that passed, with `mooncake serve --self-check` only; one that fails "
                "ends its process."),
    ),
    "Transfers between a worker and the storage nodes": (
        counter("mooncake_transfers_total", "transfers", WORKERS,
                "Transfers that ended well.", TRANSPORT, Label("direction", ("read", "write"))),
        counter("mooncake_transfer_bytes_total", "bytes", WORKERS,
                "Bytes of these transfers.", TRANSPORT, Label("direction", ("read", "write"))),
        counter("mooncake_transfer_seconds_total", "seconds", WORKERS,
                "Time of these transfers; parallel transfers add up.", TRANSPORT),
        counter("mooncake_transfer_failures_total", "transfers", WORKERS,
                "Transfers that failed or missed their deadline.", TRANSPORT),
        counter("mooncake_nic_bytes_total", "bytes", WORKERS,
                "Bytes moved over a network card that has a NIXL agent of its own.",
                NIC, Label("direction", ("read", "write"))),
        counter("mooncake_nic_failures_total", "parts", WORKERS,
                "Parts of transfers that failed over such a card, or were overdue and moved.",
                NIC, Label("kind", ("failed", "given_up"))),
        gauge("mooncake_nic_resting_paths", "paths", WORKERS,
              "Paths from this card to cards of storage nodes that are unused until a probe works.",
              NIC),
        counter("mooncake_nixl_agents_given_up_total", "agents", WORKERS,
                "NIXL agents that stay unused until the process ends; 32 at most, and then a "
                "stuck card costs every transfer its whole deadline."),
    ),
    "TensorRT-LLM's own": tuple(
        # TensorRT-LLM's own Triton model has the same names, so its dashboards work here too.
        gauge(name, unit, WORKERS, f"{meaning} With engine tensorrt_llm only.", Label(label))
        for name, unit, meaning, label in (
            ("nv_trt_llm_request_metrics", "requests", "Requests in the engine.", "request_type"),
            ("nv_trt_llm_kv_cache_block_metrics", "pages",
             "Pages of the engine's KV memory (it calls them blocks).", "kv_cache_block_type"),
            ("nv_trt_llm_runtime_memory_metrics", "bytes", "Memory of the engine.", "memory_type"),
            ("nv_trt_llm_inflight_batcher_metrics", "1", "Its newest iteration.",
             "inflight_batcher_specific_metric"),
            ("nv_trt_llm_general_metrics", "1", "How many iterations there were.", "general_type"),
        )
    ),
    "Storage nodes, as the directory knows them": (
        gauge("mooncake_store_bytes_used", "bytes", (FRONTEND,),
              "Bytes of blocks, those being written included.", NODE),
        gauge("mooncake_store_bytes_max", "bytes", (FRONTEND,),
              "The node's memory. Node s0/ssd is the SSD tier of s0, here as in the others.", NODE),
        gauge("mooncake_store_blocks", "blocks", (FRONTEND,), "Blocks that can be read.", NODE),
        counter("mooncake_store_evictions_total", "blocks", (FRONTEND,),
                "Blocks that were evicted for others.", NODE),
        counter("mooncake_store_lookup_blocks_total", "blocks", (FRONTEND,),
                "Blocks that workers looked up, those of hand-overs included: found in DRAM, found "
                "on an SSD only, or nowhere.", Label("result", ("dram", "ssd", "miss"))),
        counter("mooncake_store_spills_total", "blocks", (FRONTEND,),
                "Cold blocks that nodes were asked to copy to their SSDs."),
        counter("mooncake_store_restored_blocks_total", "blocks", WORKERS,
                "Blocks that nodes read back from SSD into DRAM because this worker wanted them."),
        counter("mooncake_store_bad_copies_total", "blocks", (FRONTEND,),
                "Copies that a reader found missing or corrupt (checksums); they are dropped."),
        gauge("mooncake_store_leases", "leases", (FRONTEND,),
              "Leases on copies of blocks, over all nodes.", is_use=True),
    ),
    "Gateway": (
        counter("mooncake_gateway_requests_total", "requests", (GATEWAY,),
                "HTTP requests, by path and status.", Label("path"), Label("status")),
        counter("mooncake_gateway_refusals_total", "requests", (GATEWAY,),
                "Requests that got an error instead of an answer, or at its end, by its `code`.",
                Label("code")),
        counter("mooncake_gateway_messages_total", "messages", (GATEWAY,),
                "Events of streams, and whole answers, that were sent to clients."),
        counter("mooncake_gateway_clients_left_total", "requests", (GATEWAY,),
                "Requests whose client disconnected before the end of its answer."),
        counter("mooncake_gateway_trace_spans_total", "spans", (GATEWAY,),
                "As mooncake_trace_spans_total, of the gateway's own; not there without tracing.",
                Label("result", SPAN_RESULTS)),
        gauge("mooncake_gateway_requests_in_flight", "requests", (GATEWAY,),
              "HTTP requests in flight in this process of the gateway.", Label("gateway"),
              is_use=True),
    ),
}  # fmt: skip
METRICS: dict[str, Metric] = {m.name: m for metrics in SECTIONS.values() for m in metrics}
