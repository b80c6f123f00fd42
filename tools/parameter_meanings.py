"""What each parameter of a config.pbtxt means to an operator, and within which limits it may be.

docs/reference/parameters.md is printed from this (parameter_docs.py), with types and defaults from
the classes that read them. Limits that are empty follow from the class: choices, shares, positive
numbers. A test holds those that are written here against what the classes refuse.

Not here: defaults, and the reasons for them (backends/config_pbtxt.py, conductor/config.py,
backends/engine/{trtllm,vllm}/settings.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterMeaning:
    """One row of the reference."""

    name: str
    limits: str  # empty: as the class says
    meaning: str


WORKER: tuple[ParameterMeaning, ...] = (
    ParameterMeaning(
        "checkpoint",
        "`demo`, or a folder with `config.json`",
        "Hugging Face folder of the Llama, Mistral, Qwen2, Qwen3 or DeepSeek-V3 family, or of "
        "another one that `vllm` or `tensorrt_llm` serves; a relative path starts beside the model "
        "repository",
    ),
    ParameterMeaning(
        "engine",
        "`torch`, `tensorrt_llm`, `vllm`",
        "the engine behind the worker; every worker alike. `vllm` needs an interpreter that has "
        "vLLM, which `make vllm` makes for CPUs; `tensorrt_llm` needs GPUs and its own package "
        "([deploy/README.md](../../deploy/README.md))",
    ),
    ParameterMeaning(
        "dtype",
        "`float32`, `bfloat16`; with `tensorrt_llm` and `vllm` also `float16`",
        "of weights, and of KV but for `kv_dtype`; every worker alike",
    ),
    ParameterMeaning(
        "kv_dtype",
        "`auto`, `fp8`",
        "`fp8`: KV is kept as e4m3, with the checkpoint's scales (`k_scale`, `v_scale`; 1 where it "
        "has none), in a byte instead of two or four; `auto`: so where the checkpoint asks for it "
        "(`kv_cache_scheme`, `kv_cache_quant_algo`), else as `dtype`. With `tensorrt_llm` its "
        "`kv_cache_config.dtype`, with `vllm` its `kv_cache_dtype`; every worker alike",
    ),
    ParameterMeaning(
        "device",
        "`cpu`, `cuda`, `cuda:N`",
        "where the engine computes; only `cpu` has been run so far. With `vllm`, `cuda` gives the "
        "worker GPUs of its own (`gpus`)",
    ),
    ParameterMeaning(
        "threads", "1 to 256", "CPU threads of the engine; all workers of a host share its cores"
    ),
    ParameterMeaning(
        "store_node",
        "a node of `mooncake serve --nodes`",
        "the storage node that this worker belongs to",
    ),
    ParameterMeaning(
        "block_tokens",
        "a power of two, 1 or more",
        "tokens per KV block, the unit of reuse; every worker alike",
    ),
    ParameterMeaning(
        "context_tokens_max",
        "0 or more, to the checkpoint's",
        "longest prompt plus output; 0: what the checkpoint allows. Never more than the pages of "
        "`kv_bytes` hold",
    ),
    ParameterMeaning(
        "kv_bytes",
        "2 pages or more, like `256M` or `1.5G`",
        "KV memory of the engine, in whole pages of `block_tokens` tokens. A page of 64 tokens has "
        "1.4 MiB with SmolLM2-135M in bfloat16, and 128 KiB with the demo",
    ),
    ParameterMeaning(
        "kv_pages",
        "0, 2 or more",
        "deprecated, for one release: the number of pages, which overrides `kv_bytes`; 0: "
        "`kv_bytes` decides",
    ),
    ParameterMeaning(
        "transport",
        "`auto`, `mapped`, `nixl`, `tcp`",
        "`auto`: the own node by mapped memory, others by NIXL, where NIXL cannot load by mapped "
        "memory on this host and plain TCP elsewhere; `mapped`: every node of the host mapped; "
        "`nixl`, `tcp`: even the own node that way",
    ),
    ParameterMeaning(
        "lease_s",
        "1 or more, above `transfer_s_max`",
        "how long a request's blocks stay protected without a sign of life",
    ),
    ParameterMeaning(
        "transfer_s_max",
        "above 0, below `lease_s`",
        "deadline of one transfer; what is later counts as a miss",
    ),
    ParameterMeaning(
        "roles",
        "`one`, `both`",
        "`both`: it begins in the role of its `backend`, and takes the other one when the "
        "conductor tells it to (`role_flips`), with the parameters of both kinds of worker "
        "(below). With `engine` `torch` or `vllm`",
    ),
)
PREFILL: tuple[ParameterMeaning, ...] = (
    ParameterMeaning(
        "chunk_tokens",
        "a positive multiple of `block_tokens`",
        "longest prefill step; bounds how long the next prompt waits",
    ),
    ParameterMeaning(
        "layerwise",
        "`true` or `false`",
        "a prompt longer than `chunk_tokens` passes layer by layer, while the next layer of its "
        "cached prefix is loaded, and takes a fraction of the pages; the conductor predicts its "
        "TTFT so. Only with `engine` `torch` and without `pipeline_group`",
    ),
    ParameterMeaning(
        "queue_requests_max", "1 or more", "prompts that wait; beyond, they are rejected"
    ),
    ParameterMeaning(
        "pipeline_group",
        "a name, or empty",
        "prefill workers of one name compute each prompt together, each with a share of the "
        "layers; empty: alone",
    ),
    ParameterMeaning(
        "pipeline_stage", "0 to `pipeline_stages` - 1", "which share; requests go to stage 0"
    ),
    ParameterMeaning("pipeline_stages", "1 to the model's layers", "how many stages the group has"),
)
DECODE: tuple[ParameterMeaning, ...] = (
    ParameterMeaning("slots", "1 to 4096", "requests that decode at once"),
    ParameterMeaning(
        "queue_requests_max",
        "1 or more",
        "requests that wait for pages and a slot; beyond, they are rejected",
    ),
)
TRTLLM: tuple[ParameterMeaning, ...] = (
    ParameterMeaning(
        "gpus",
        "CUDA device numbers, `0` or `0,1`; as many as `tp_size`",
        "the GPUs of this worker, as this process sees them; empty: the first ones",
    ),
    ParameterMeaning(
        "tp_size",
        "1 or more; divides the model's heads",
        "tensor parallel size; every worker alike",
    ),
    ParameterMeaning(
        "page_tokens",
        "a power of two that divides `block_tokens`",
        "tokens of a page of TensorRT-LLM; every worker alike",
    ),
    ParameterMeaning(
        "gpu_memory_fraction",
        "above 0, below 1",
        "of the GPU memory that is free when the engine starts: the most that KV may take, "
        "whatever `kv_bytes` asks for",
    ),
    ParameterMeaning(
        "handoff",
        "`store`, `native`",
        "how KV gets from prefill to decode: through the store, or from GPU to GPU by "
        "TensorRT-LLM itself; every worker alike",
    ),
    ParameterMeaning(
        "aside_load_mib",
        "0 or more",
        "a prefix of so many MiB over one GPU's bus is loaded beside the passes of other "
        "prompts, a smaller one in its own pass; what is handed over to decode always beside the "
        "steps of its streams; 0: all in their own. With `handoff` `native` always 0",
    ),
    ParameterMeaning(
        "transceiver",
        "`DEFAULT`, `NIXL`, `UCX`, `MOONCAKE`, `MPI`",
        "of `native`: its `cache_transceiver_config.backend`",
    ),
    ParameterMeaning(
        "llm_options",
        "a JSON object, or the name of a file with one, beside the model repository",
        "further keywords of `tensorrt_llm.LLM`. What other parameters say, and what cannot work "
        "with KV from a store (pipeline parallelism, attention DP, beams, partial or disabled "
        "page reuse, a host cache, several windows, eviction of running requests), is refused by "
        "name, with the reason",
    ),
)
VLLM: tuple[ParameterMeaning, ...] = (
    ParameterMeaning(
        "engine_python",
        "a program; relative: beside the model repository",
        "the Python that has vLLM. Empty: `.venv-vllm/bin/python`, which `make vllm` makes, beside "
        "the model repository or in the checkout; without it, the worker's own Python. `mooncake "
        "doctor` checks it",
    ),
    ParameterMeaning(
        "gpus",
        "CUDA device numbers, `0` or `0,1`; as many as `tp_size`",
        "with `device` `cuda`: the GPUs of this worker, as this process sees them; empty: the "
        "first ones",
    ),
    ParameterMeaning(
        "tp_size",
        "1 or more; divides the model's heads",
        "tensor parallel size; every worker alike",
    ),
    ParameterMeaning(
        "page_tokens",
        "a power of two that divides `block_tokens`",
        "tokens of a page, which vLLM calls a block. On CPUs a multiple of 32, and 16 with latent "
        "attention; every worker alike",
    ),
    ParameterMeaning(
        "vllm_options",
        "a JSON object, or the name of a file with one, beside the model repository",
        "further keywords of vLLM's `AsyncEngineArgs`. What other parameters say, and what cannot "
        "work with KV from a store (pipeline and data parallelism, drafts, a disabled prefix cache "
        "or chunked prefill, offloading, sleep mode), is refused by name, with the reason",
    ),
)
FRONTEND: tuple[ParameterMeaning, ...] = (
    ParameterMeaning(
        "checkpoint",
        "`demo`, or a folder with `config.json`",
        "whose tokenizer and chat template; the workers'",
    ),
    ParameterMeaning("requests_max", "1 to 4096", "requests in flight; each holds a thread"),
    ParameterMeaning(
        "tenant_requests_share",
        "above 0, to 1",
        "of `requests_max`: what one tenant may have in flight while another tenant has requests,"
        " or had one rejected in the last 5 s; alone a tenant may have all. After a rejection of a"
        " tenant with fewer requests, at most an equal part",
    ),
    ParameterMeaning(
        "attempts_max",
        "1 or more",
        "attempts that may be lost to workers that died or failed with the request in their "
        "hands, so that no prompt kills them all; whatever else is lost is free until the "
        "deadline",
    ),
    ParameterMeaning(
        "cancel_poll_s", "0.01 to 1.0", "how often clients are checked for having gone away"
    ),
    ParameterMeaning(
        "output_tokens_default", "1 or more", "`max_tokens` where a request names none"
    ),
    ParameterMeaning(
        "tool_call_parser",
        "`auto`, `deepseek_v3`, `hermes`, `kimi_k2`, `llama3_json`, `mistral` or `pythonic`",
        "format of the model's tool calls ([tools](gateway.md#tools)); `auto`: found by the chat "
        "template",
    ),
    ParameterMeaning(
        "reasoning_parser",
        "`auto`, `none`, `deepseek_r1`, `kimi`, `kimi_k2` or `qwen3`",
        "marks of the model's thinking ([reasoning](responses.md#reasoning)); `auto`: found in the "
        "chat template; `none`: the thinking stays in the answer's text",
    ),
    ParameterMeaning(
        "messages_per_s_max",
        "0 or more",
        "messages per second to all streaming clients together. When decoding is faster, tokens "
        "of a stream that come within (streams / this) seconds share a message, 0.1 s at most; "
        "the first token never waits. 0: 250 for each core of the machine, 4,000 at most, because"
        " a message costs about 0.4 ms of CPU time",
    ),
    ParameterMeaning(
        "recording_folder",
        "a folder; relative: beside the repository",
        "the traffic is recorded there as traces that `mooncake replay`, `simulate` and `plan` "
        "read: times, lengths and salted ids of blocks, no text and no tokens "
        "([how](backends.md#a-recording-of-the-traffic)). Empty: nothing is recorded",
    ),
    ParameterMeaning(
        "recording_bytes_max",
        "1048576 or more",
        "of all traces in that folder together; the oldest go",
    ),
)
CONDUCTOR: tuple[ParameterMeaning, ...] = (
    ParameterMeaning(
        "ttft_slo_s",
        "",
        "seconds; a request whose predicted time to first token is longer is rejected at once. "
        "`auto`: 10x of what the whole prompt would take on an unloaded system, at least 1 s",
    ),
    ParameterMeaning(
        "tbt_slo_s",
        "",
        "the same for the predicted time between tokens. `auto`: 5x of a decode step of the "
        "request alone, at least 0.05 s",
    ),
    ParameterMeaning(
        "advisory", "", "true: decide and count, never reject for a service level or for room"
    ),
    ParameterMeaning(
        "admission",
        "",
        "which decode load is judged: `reserved` all that is there or on its way; `predictive` "
        "what will be there when this prefill ends, each request staying the measured mean time; "
        "`predictive_lengths` the same with output lengths learned online; `early` what is there "
        "now; `baseline` none, only TTFT; `none`: no service level at all, only what does not fit",
    ),
    ParameterMeaning(
        "low_priority_load_max",
        "",
        "requests with negative priority are admitted up to this share of an SLO",
    ),
    ParameterMeaning(
        "shedding",
        "",
        "whom overload turns away: `fair_share` the costliest first, with a floor for each class "
        "of prompt length and a share for each tenant; `limit` whoever would miss a limit",
    ),
    ParameterMeaning(
        "backlog_share", "", "of `ttft_slo_s`: the queue that `fair_share` holds overload at"
    ),
    ParameterMeaning(
        "length_share_min",
        "",
        "a class of prompt lengths is admitted at least so often, relative to all",
    ),
    ParameterMeaning(
        "priority_weight",
        "1 or more",
        "one level of `request_priority` is worth so many times the work",
    ),
    ParameterMeaning(
        "tenant_shares",
        "`NAME:WEIGHT,...`, weights above 0",
        "weights like `a:2,b:1`; a tenant that is not named weighs 1",
    ),
    ParameterMeaning(
        "demand_half_life_s", "", "how fast what was offered and admitted is forgotten"
    ),
    ParameterMeaning(
        "ttft_margin_quantile",
        "",
        "of measured / predicted TTFT: the limit is divided by it; 0: taken as it is",
    ),
    ParameterMeaning(
        "decode_room_sigma",
        "",
        "predicted batches get so many standard deviations (`predictive_lengths`)",
    ),
    ParameterMeaning(
        "expected_arrivals_share",
        "",
        "both predictions keep room for this share of the requests that will come meanwhile and "
        "join before this one",
    ),
    ParameterMeaning(
        "overload_mark_s", "", "a decode worker that refused on arrival counts as full for so long"
    ),
    ParameterMeaning(
        "retry_after_s_min",
        "0 to `retry_after_s_max`",
        "the least `retry_after_s` of a rejection: who comes back sooner only adds load",
    ),
    ParameterMeaning(
        "retry_after_s_max",
        "`retry_after_s_min` or more",
        "the largest one: predictions further out are guesses",
    ),
    ParameterMeaning(
        "policy",
        "",
        "where prompts go: Algorithm 1 of the paper; `adaptive`, which also counts what a request"
        " does to those it overtakes, and compares times instead of a threshold; or the paper's "
        "comparisons: `cache_aware`, `load_balance`, `random`",
    ),
    ParameterMeaning(
        "kvcache_balancing_threshold",
        "1 or more",
        "of `kvcache_centric`: fetch a prefix when another node has this many times more of it",
    ),
    ParameterMeaning(
        "fetch_must_pay",
        "",
        "of `kvcache_centric`: fetch only when that is predicted to beat computing, too",
    ),
    ParameterMeaning(
        "slow_start_s",
        "",
        "a worker that joins others gets its share little by little over this time; 0: at once",
    ),
    ParameterMeaning(
        "queue_order", "", "inside a prefill worker: short work first, with ageing; or `fifo`"
    ),
    ParameterMeaning(
        "queue_stretch", "", "seconds that a prompt queues later per second of its predicted work"
    ),
    ParameterMeaning(
        "queue_wait_s_max",
        "",
        "and at most so long: nobody is overtaken by what came so much later; while overload is "
        "shed, at most `backlog_share` of `ttft_slo_s`",
    ),
    ParameterMeaning("tie_ratio", "", "predictions this close, as a share of them, are equal"),
    ParameterMeaning("tie_s", "", "the same in seconds"),
    ParameterMeaning(
        "finalists_max", "", "nodes of prefill workers for which a decode partner is looked up"
    ),
    ParameterMeaning(
        "output_tokens_expected",
        "",
        "so many steps of decoding count in the choice of a pair, where `max_tokens` is more",
    ),
    ParameterMeaning(
        "decode_s_expected", "", "first guess of a request's decode time; then measured"
    ),
    ParameterMeaning(
        "learn_speed", "", "scale a worker's estimates by what it was measured to need"
    ),
    ParameterMeaning("transfer_bytes_per_s", "", "between nodes that nobody has measured"),
    ParameterMeaning("transfer_latency_s", "", "of a transfer between such nodes"),
    ParameterMeaning("local_bytes_per_s", "", "within a node that nobody has measured"),
    ParameterMeaning("ssd_bytes_per_s", "", "restoring blocks from a node's SSD"),
    ParameterMeaning(
        "report_s_max", "above `report_lag_s`", "a worker silent for longer is not routed to"
    ),
    ParameterMeaning(
        "report_lag_s",
        "0 or more, below `report_s_max`",
        "a report cannot know requests routed less than this before it",
    ),
    ParameterMeaning(
        "frontend_silent_s_max",
        "",
        "another frontend that tells nothing for so long is gone: its requests are known from "
        "reports only",
    ),
    ParameterMeaning(
        "failed_mark_s", "", "a worker whose call failed is avoided so long, or until it reports"
    ),
    ParameterMeaning(
        "request_s_max",
        "",
        "a request that its frontend lost is then known from reports only; so long after its "
        "arrival, or its last attempt that decoded tokens, a request that lost its workers or its"
        " KV goes on, unless its `timeout_ms` is shorter",
    ),
    ParameterMeaning(
        "role_flips",
        "",
        "which workers had better take the other role, as the load lastingly lacks it: `dry_run` "
        "counts and logs it; `on` tells those whose `roles` is `both`",
    ),
    ParameterMeaning("index_blocks_max", "", "bound of the prefix index"),
    ParameterMeaning("replicate", "", "copy hot prefixes to a further node"),
    ParameterMeaning(
        "hot_hits_per_s", "", "hits per second and copy above which one more copy is made"
    ),
    ParameterMeaning("hot_half_life_s", "", "how fast old hits fade"),
    ParameterMeaning("hot_copies_max", "", "copies of a hot block, the first included"),
    ParameterMeaning("hot_keys_max", "", "counted keys"),
    ParameterMeaning("hot_blocks_per_tick_max", "", "blocks suggested for copying at once"),
    ParameterMeaning("hot_blocks_in_flight_max", "", "blocks suggested and not arrived yet"),
    ParameterMeaning("hot_target_blocks_max", "", "of those, to one target"),
    ParameterMeaning(
        "replicate_s_max", "", "a suggestion that has not arrived by then did not happen"
    ),
)
