"""Every metric of this project on the metrics page of `mooncake serve`: name, kind, unit, meaning.

Publishing a name, label or label value that is not in this table raises Undeclared (page.py).
docs/metrics.md is printed from this table (tools/metric_docs.py).

Names follow Prometheus: base units (`_seconds`, `_bytes`), and `_total` at the end of a counter. A
series that a Triton model publishes also has the label `model`, the model's name.
Not here: where a number comes from (backends/frontend/metrics.py, backends/workers/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
FRONTEND, PREFILL, DECODE = "conductor", "prefill", "decode"  # Triton backends of the publishers
GATEWAY = "gateway"  # publisher without Triton: gateway processes (mooncake serve --openai-port)
WORKERS = (PREFILL, DECODE)

# Upper bounds of histogram buckets. Each bound is at most twice the previous bound, so an
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
    unit: str  # a Prometheus base unit, or the counted thing; "1": no unit
    publishers: tuple[str, ...]  # Triton backends whose models publish the metric, or GATEWAY
    meaning: str  # HELP text on the metrics page
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds in `unit`
    is_use: bool = False  # True: a gauge that is 0 on an idle server without faults

    def series_labels(self) -> Iterator[dict[str, str]]:
        """Every combination of allowed label values; none if one of the labels allows any value."""
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
HEAT = Label("heat", ("1", "2", "4", "8"))  # lowest hit rate of a class, in hot_hits_per_s
PREDICTION = Label("kind", ("predicted", "actual"))
NIC = Label("nic")
TRANSPORT = Label("transport", ("mapped", "nixl", "tcp"))

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Requests": (
        gauge("mooncake_requests_live", "requests", (FRONTEND,),
              "Requests between arrival and answer.", is_use=True),
        counter("mooncake_requests_total", "requests", (FRONTEND,),
                "Ended requests by outcome: answered, or the first word of the error text.",
                Label("outcome", OUTCOMES)),
        counter("mooncake_requests_within_slo_total", "requests", (FRONTEND,),
                "Answered requests within ttft_slo_s and tbt_slo_s (goodput). The limit "
                "of TBT applies to streams with more than one token."),
        counter("mooncake_rejections_total", "requests", (FRONTEND,),
                "Requests rejected for lack of capacity or by a limit, by `kind` of the error.",
                Label("reason", REASONS)),
        counter("mooncake_wasted_prefills_total", "requests", (FRONTEND,),
                "Requests that a decode worker rejected after their prefill was computed."),
        counter("mooncake_wasted_prefill_seconds_total", "seconds", (FRONTEND,),
                "Computation time of the prefills in mooncake_wasted_prefills_total."),
        counter("mooncake_routed_total", "attempts", (FRONTEND,),
                "Attempts of requests that were given to a pair of workers."),
        counter("mooncake_retries_total", "attempts", (FRONTEND,),
                "Further attempts of requests after a lost attempt."),
        counter("mooncake_fetches_total", "attempts", (FRONTEND,),
                "Attempts routed to fetch part of the prefix from another node (Algorithm 1)."),
        counter("mooncake_replicated_blocks_total", "blocks", (FRONTEND,),
                "Suggested copies of hot blocks to other nodes, repeated suggestions included."),
        gauge("mooncake_hot_blocks", "blocks", (FRONTEND,),
              "Hottest blocks (at most 2,048), by class of their hit rate from requests of this "
              "frontend. heat 2: from 2 up to 4 times hot_hits_per_s. heat 8: 8 times or more. The "
              "weight of a hit halves every hot_half_life_s.", HEAT),
        gauge("mooncake_hot_block_copies", "copies", (FRONTEND,),
              "Copies in DRAM of the blocks of mooncake_hot_blocks, over all nodes.", HEAT),
        gauge("mooncake_workers_wanted", "workers", (FRONTEND,),
              "Estimated number of workers that the load needs in this role, so that TTFT and TBT "
              "stay within mooncake_slo_seconds. Only with role_flips.", Label("role")),
        counter("mooncake_role_flips_proposed_total", "flips", (FRONTEND,),
                "Proposals that a worker take this role. In a dry run (role_flips) they have no "
                "effect.", Label("role")),
        gauge("mooncake_frontends_known", "frontends", (FRONTEND,),
              "Other frontends of this deployment whose latest message is recent."),
        gauge("mooncake_routed_elsewhere", "requests", (FRONTEND,),
              "Requests that other frontends routed and that this frontend's conductor counts in "
              "the workers' load.", is_use=True),
        counter("mooncake_routing_note_batches_total", "batches", (FRONTEND,),
                "Batches of notes between frontends about routed requests. unsent: the directory "
                "did not accept it; missed: a batch of another frontend did not arrive.",
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
                "Requests of a tenant that ended, by outcome. The first 64 tenants with a request "
                "have series of their own, later tenants share `(others)`.",
                TENANT, Label("outcome", OUTCOMES)),
        counter("mooncake_tenant_rejections_total", "requests", (FRONTEND,),
                "Requests of a tenant that were rejected, for a limit of the tenant or another "
                "reason.", TENANT, Label("reason", TENANT_REASONS)),
        counter("mooncake_tenant_tokens_total", "tokens", (FRONTEND,),
                "Tokens of a tenant: prompt tokens, prompt tokens with cached KV, answer tokens.",
                TENANT, Label("kind", ("prompt", "cached", "output"))),
        gauge("mooncake_tenant_requests_live", "requests", (FRONTEND,),
              "Requests of a tenant between arrival and answer.", TENANT, is_use=True),
    ),
    "Latency": (
        gauge("mooncake_slo_seconds", "seconds", (FRONTEND,),
              "The conductor's parameters ttft_slo_s and tbt_slo_s: limits for admission and "
              "goodput. With auto, the mean of recent requests.",
              Label("limit", ("ttft", "tbt"))),
        seconds("mooncake_ttft_seconds", FRONTEND,
                "Time to first token: from the arrival of a request until the frontend sends its "
                "first token, parsing and tokenising included."),
        seconds("mooncake_tbt_seconds", FRONTEND,
                "Time between tokens of a streamed answer: the mean of the longest 10 % of its "
                "intervals, as in FAST'25. One value per request."),
        counter("mooncake_token_intervals_total", "intervals", (FRONTEND,),
                "Intervals between tokens of streamed answers."),
        counter("mooncake_token_interval_seconds_total", "seconds", (FRONTEND,),
                "Sum of the intervals in mooncake_token_intervals_total."),
        seconds("mooncake_request_duration_seconds", FRONTEND,
                "Time of an answered request, from its arrival to the end of its answer."),
        ratio("mooncake_ttft_prediction_error_ratio", FRONTEND,
              "abs(predicted - actual) / actual of the time from the conductor's decision to the "
              "end of prefill. One value per attempt."),
        ratio("mooncake_tbt_prediction_error_ratio", FRONTEND,
              "abs(predicted - actual) / actual of the TBT of a streamed answer."),
        counter("mooncake_ttft_prediction_seconds_total", "seconds", (FRONTEND,),
                "Sums of the predicted and the actual times in "
                "mooncake_ttft_prediction_error_ratio.", PREDICTION),
        counter("mooncake_tbt_prediction_seconds_total", "seconds", (FRONTEND,),
                "Sums of the predicted and the actual times in "
                "mooncake_tbt_prediction_error_ratio.", PREDICTION),
    ),
    "Where the time goes": (
        seconds("mooncake_prefill_queue_seconds", PREFILL,
                "Time for which a prompt waits at its prefill worker, in total."),
        seconds("mooncake_prefix_load_seconds", PREFILL,
                "Time to load a cached prefix into the pages, fetching from another node included. "
                "Only prompts with a cached prefix."),
        seconds("mooncake_prefill_compute_seconds", PREFILL,
                "Time of the steps that computed a prompt."),
        seconds("mooncake_handover_put_seconds", PREFILL,
                "From the last step of a prompt until all its KV is committed in the store."),
        seconds("mooncake_decode_queue_seconds", DECODE,
                "From the arrival of a request at its decode worker until it has pages and the "
                "reading of missing KV begins."),
        seconds("mooncake_handover_load_seconds", DECODE,
                "Time to read the missing KV of a request into the decode worker's pages."),
        counter("mooncake_decode_preemptions_total", "requests", (DECODE,),
                "Running requests whose pages a request of higher priority took; they resume with "
                "KV from the store."),
    ),
    "Tokens": (
        counter("mooncake_prompt_tokens_total", "tokens", (PREFILL,),
                "Prompt tokens by the source of their KV: computed, local (cached on the worker's "
                "node), fetched (from another node).",
                Label("path", ("computed", "local", "fetched"))),
        counter("mooncake_aborted_prefill_tokens_total", "tokens", (PREFILL,),
                "Prompt tokens computed for requests that were cancelled or failed before their "
                "first token. Not in mooncake_prompt_tokens_total. Engine torch only."),
        counter("mooncake_handover_tokens_total", "tokens", (DECODE,),
                "Tokens of requests that start in decode, by the source of their KV. loaded: "
                "handed over. local: still in the engine. computed: computed again (tokens after "
                "the last whole page, and tokens whose KV is missing). Not with engine torch.",
                Label("path", ("loaded", "local", "computed"))),
        counter("mooncake_output_tokens_total", "tokens", WORKERS,
                "Tokens generated: the first of each prompt by prefill, the others by decode."),
    ),
    "Workers": (
        gauge("mooncake_worker_info", "1", WORKERS,
              "Always 1. The labels have the worker's role, storage node and KV layout.",
              Label("role"), NODE, Label("fingerprint"), Label("block_tokens")),
        gauge("mooncake_start_time_seconds", "seconds", (FRONTEND, *WORKERS),
              "When the model's process started, in Unix time."),
        gauge("mooncake_workers_live", "workers", (FRONTEND,),
              "Workers that the conductor may choose from.",
              Label("role", ("prefill", "decode"))),
        gauge("mooncake_worker_unreached", "1", (FRONTEND,),
              "1 while this frontend cannot call the worker. Cause refused: keys or certificates "
              "do not fit; cut_off: no connection.",
              Label("worker"), Label("cause", ("refused", "cut_off")), is_use=True),
        gauge("mooncake_requests_waiting", "requests", WORKERS,
              "Accepted requests without pages (prefill), or not in the running batch (decode).",
              is_use=True),
        gauge("mooncake_requests_running", "requests", WORKERS,
              "Requests with pages (prefill), or in the running batch (decode).", is_use=True),
        gauge("mooncake_queue_tokens", "tokens", (PREFILL,),
              "Prompt tokens that are not computed yet. Cached tokens count until they are loaded.",
              is_use=True),
        gauge("mooncake_context_tokens", "tokens", (DECODE,),
              "KV tokens that the next step of the running batch reads.", is_use=True),
        counter("mooncake_steps_total", "steps", WORKERS, "Steps of the engine."),
        counter("mooncake_step_seconds_total", "seconds", WORKERS,
                "Time of the steps in mooncake_steps_total. Its rate is the engine's utilization."),
        gauge("mooncake_step_age_seconds", "seconds", WORKERS,
              "Age of the engine's current step; 0 between steps. A worker whose step does not end "
              "deregisters, and its process restarts."),
        gauge("mooncake_pages_used", "pages", WORKERS,
              "Reserved pages of KV memory, whether full or not.", is_use=True),
        gauge("mooncake_pages_max", "pages", WORKERS, "All pages of KV memory."),
        gauge("mooncake_kv_bytes_used", "bytes", WORKERS, "Bytes of the reserved pages.",
              is_use=True),
        gauge("mooncake_kv_bytes_max", "bytes", WORKERS, "Bytes of the engine's KV memory."),
        counter("mooncake_kv_occupation_byte_seconds_total", "byte seconds", WORKERS,
                "VRAM occupation cost: reserved bytes times the seconds for which they are "
                "reserved. It is updated when pages are reserved or freed."),
        gauge("mooncake_leases_held", "requests", WORKERS,
              "Requests for which this worker holds leases on blocks in the store.", is_use=True),
        counter("mooncake_self_checks_total", "checks", (FRONTEND, *WORKERS),
                "Self-checks that passed, with `mooncake serve --self-check` only. A process whose "
                "self-check fails exits."),
    ),
    "Transfers between a worker and the storage nodes": (
        counter("mooncake_transfers_total", "transfers", WORKERS,
                "Transfers that succeeded.", TRANSPORT, Label("direction", ("read", "write"))),
        counter("mooncake_transfer_bytes_total", "bytes", WORKERS,
                "Bytes of successful transfers.", TRANSPORT,
                Label("direction", ("read", "write"))),
        counter("mooncake_transfer_seconds_total", "seconds", WORKERS,
                "Time of successful transfers; times of parallel transfers add up.", TRANSPORT),
        counter("mooncake_transfer_failures_total", "transfers", WORKERS,
                "Transfers that failed or missed their deadline.", TRANSPORT),
        counter("mooncake_nic_bytes_total", "bytes", WORKERS,
                "Bytes moved over a network card that has a NIXL agent of its own.",
                NIC, Label("direction", ("read", "write"))),
        counter("mooncake_nic_failures_total", "parts", WORKERS,
                "Parts of transfers over a card with its own NIXL agent. failed: an error. "
                "given_up: late, and moved to another path.",
                NIC, Label("kind", ("failed", "given_up"))),
        gauge("mooncake_nic_resting_paths", "paths", WORKERS,
              "Paths from this card to cards of storage nodes that are unused until a probe "
              "succeeds.", NIC),
        counter("mooncake_nixl_agents_given_up_total", "agents", WORKERS,
                "NIXL agents that were given up because a transfer was stuck. A process gives up "
                "at most 32. After that, transfers over a stuck card wait until their deadline."),
    ),
    "TensorRT-LLM's own": tuple(
        # TensorRT-LLM's own Triton model has the same names, so its dashboards work here too.
        gauge(name, unit, WORKERS, f"{meaning} With engine tensorrt_llm only.", Label(label))
        for name, unit, meaning, label in (
            ("nv_trt_llm_request_metrics", "requests", "Requests in the engine.", "request_type"),
            ("nv_trt_llm_kv_cache_block_metrics", "pages",
             "Pages of the engine's KV memory; TensorRT-LLM calls them blocks.",
             "kv_cache_block_type"),
            ("nv_trt_llm_runtime_memory_metrics", "bytes", "Memory of the engine.", "memory_type"),
            ("nv_trt_llm_inflight_batcher_metrics", "1", "The engine's latest iteration.",
             "inflight_batcher_specific_metric"),
            ("nv_trt_llm_general_metrics", "1", "Iterations of the engine.", "general_type"),
        )
    ),
    "vLLM's own": tuple(
        # vLLM's own Triton model has the same names, so its dashboards work here too.
        gauge(name, unit, WORKERS, f"{meaning} With engine vllm only.")
        for name, unit, meaning in (
            ("vllm:num_requests_running", "requests", "Requests in the engine's steps."),
            ("vllm:num_requests_waiting", "requests", "Requests that wait in the engine."),
            ("vllm:kv_cache_usage_perc", "1", "Used share of the engine's KV memory, 0 to 1."),
            ("vllm:prefix_cache_hits", "tokens", "Tokens found in the engine's own cache."),
            ("vllm:prefix_cache_queries", "tokens", "Tokens looked for in that cache."),
            ("vllm:num_preemptions", "requests", "Requests that the engine preempted."),
        )
    ),
    "Storage nodes": (
        gauge("mooncake_store_bytes_used", "bytes", (FRONTEND,),
              "Bytes of blocks, including blocks that are being written. Node s0/ssd is the SSD "
              "tier of s0, in all metrics of storage nodes.", NODE),
        gauge("mooncake_store_bytes_max", "bytes", (FRONTEND,), "The node's memory.", NODE),
        gauge("mooncake_store_blocks", "blocks", (FRONTEND,), "Blocks that can be read.", NODE),
        counter("mooncake_store_evictions_total", "blocks", (FRONTEND,),
                "Blocks that were evicted to make room for other blocks.", NODE),
        counter("mooncake_store_lookup_blocks_total", "blocks", (FRONTEND,),
                "Blocks that workers looked up, hand-overs included: found in DRAM, found only on "
                "an SSD, or not found.", Label("result", ("dram", "ssd", "miss"))),
        counter("mooncake_store_spills_total", "blocks", (FRONTEND,),
                "Cold blocks for which the directory requested a copy on an SSD."),
        counter("mooncake_store_restored_blocks_total", "blocks", WORKERS,
                "Blocks that nodes read back from SSD into DRAM for this worker."),
        counter("mooncake_store_bad_copies_total", "blocks", (FRONTEND,),
                "Copies that a reader found missing or corrupt (checksums); they are dropped."),
        gauge("mooncake_store_leases", "leases", (FRONTEND,),
              "Leases on copies of blocks, over all nodes.", is_use=True),
    ),
    "Gateway": (
        counter("mooncake_gateway_requests_total", "requests", (GATEWAY,),
                "HTTP requests, by path and status.", Label("path"), Label("status")),
        counter("mooncake_gateway_refusals_total", "requests", (GATEWAY,),
                "Requests that got an error before or during their answer, by the error's `code`.",
                Label("code")),
        counter("mooncake_gateway_refused_fields_total", "requests", (GATEWAY,),
                "Requests with status 400, by the `field` that was wrong or is not supported; "
                "`other` is a name that the interface does not have.",
                Label("field")),
        counter("mooncake_gateway_messages_total", "messages", (GATEWAY,),
                "Events of streams, and whole answers, that were sent to clients."),
        counter("mooncake_gateway_clients_left_total", "requests", (GATEWAY,),
                "Requests whose client disconnected before the end of its answer."),
        counter("mooncake_gateway_trace_spans_total", "spans", (GATEWAY,),
                "The gateway's spans, as in mooncake_trace_spans_total; only with tracing.",
                Label("result", SPAN_RESULTS)),
        gauge("mooncake_gateway_requests_in_flight", "requests", (GATEWAY,),
              "HTTP requests in flight in this process of the gateway.", Label("gateway"),
              is_use=True),
    ),
}  # fmt: skip
METRICS: dict[str, Metric] = {m.name: m for metrics in SECTIONS.values() for m in metrics}
