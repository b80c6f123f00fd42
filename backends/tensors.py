"""The tensors of the models that clients call, in one table.

Names and types are those of TensorRT-LLM's model `ensemble` (inflight_batcher_llm), so clients of
that model work unchanged. A few tensors are our own, such as `messages` and `decision`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TEXT_BYTES_MAX = 4 * 1024**2  # UTF-8 bytes of a prompt's text, or of all messages of a chat
ANSWERS_MAX = 32  # most answers to one prompt (num_return_sequences)
# Values of the request parameter `describe`, which the gateway sends in calls of its own.
CLUSTER, CHARGE = "cluster", "charge"
# Kinds of a grammar that an answer follows: values of guided_decoding_guide_type in TensorRT-LLM.
JSON_SCHEMA, REGEX, GRAMMAR = "json_schema", "regex", "ebnf_grammar"
STRUCTURAL_TAG = "structural_tag"  # free text in which the parts after a trigger follow a schema
AFTER_THINKING = "after_thinking"  # free text up to a mark, then a schema or an expression; ours
TAGS = (STRUCTURAL_TAG, AFTER_THINKING)  # see backends/text/structural_tags.py
GUIDE_KINDS = (JSON_SCHEMA, REGEX, GRAMMAR, *TAGS)


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str  # the type in config.pbtxt without the prefix TYPE_
    dims: tuple[int, ...] = (1,)  # shape without the batch dimension; -1: any size
    neutral: object = None  # the only accepted value of an unsupported input; None: must be empty


SUPPORTED_INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("input_ids", "INT32", (-1,)),
    Tensor("messages", "STRING"),
    Tensor("tools", "STRING"),
    Tensor("chat_template_kwargs", "STRING"),
    Tensor("add_special_tokens", "BOOL"),
    Tensor("skip_special_tokens", "BOOL"),
    Tensor("stop_token_ids", "INT32", (-1,)),
    Tensor("max_tokens", "INT32"),
    Tensor("min_tokens", "INT32"),
    Tensor("min_length", "INT32"),
    Tensor("stream", "BOOL"),
    Tensor("stream_interval", "INT32"),
    Tensor("temperature", "FP32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("min_p", "FP32"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("random_seed", "UINT64"),
    Tensor("num_return_sequences", "INT32"),
    Tensor("stop_words", "STRING", (-1,)),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("sampling_parameters", "STRING"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("top_logprobs", "INT32"),
    Tensor("prompt_logprobs", "INT32"),
    Tensor("guided_json", "STRING"),
    Tensor("guided_decoding_guide_type", "STRING"),
    Tensor("guided_decoding_guide", "STRING"),
    Tensor("return_decision", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
)

# Inputs that TensorRT-LLM's model declares. This server accepts only the neutral value of each.
UNSUPPORTED_INPUTS = (
    Tensor("decoder_text_input", "STRING", neutral=b""),
    Tensor("bad_words", "STRING", (-1,), neutral=b""),
    Tensor("beam_width", "INT32", neutral=1),
    Tensor("length_penalty", "FP32", neutral=1.0),
    Tensor("return_context_logits", "BOOL", neutral=False),
    Tensor("return_generation_logits", "BOOL", neutral=False),
    Tensor("prompt_embedding_table", "FP16", (-1, -1)),
    Tensor("prompt_vocab_size", "INT32", neutral=0),
    Tensor("prompt_table_extra_id", "UINT64", neutral=0),
    Tensor("embedding_bias_words", "STRING", (-1,), neutral=b""),
    Tensor("embedding_bias_weights", "FP32", (-1,), neutral=0.0),
    Tensor("lora_task_id", "UINT64", neutral=0),
    Tensor("lora_weights", "FP16", (-1, -1)),
    Tensor("lora_config", "INT32", (-1, 3)),
    Tensor("image_input", "FP16", (-1, 3, -1, -1)),
    Tensor("image_url_input", "STRING", neutral=b""),
    Tensor("num_draft_tokens", "INT32", neutral=0),
    Tensor("use_draft_logits", "BOOL", neutral=False),
)

# A response has only the outputs that the client requested (frontend/answer.py, names_sent).
OUTPUTS = (
    Tensor("text_output", "STRING", (-1,)),
    Tensor("output_ids", "INT32", (-1,)),
    Tensor("context_ids", "INT32", (-1,)),
    Tensor("text_cut_bytes", "INT32"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("cached_tokens", "INT32"),
    Tensor("finish_reason", "STRING"),
    Tensor("decision", "STRING"),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    Tensor("output_log_probs", "FP32", (-1,)),
    Tensor("top_token_ids", "INT32", (-1, -1)),
    Tensor("top_log_probs", "FP32", (-1, -1)),
    Tensor("prompt_ids", "INT32", (-1,)),
    Tensor("prompt_log_probs", "FP32", (-1,)),
    Tensor("prompt_top_token_ids", "INT32", (-1, -1)),
    Tensor("prompt_top_log_probs", "FP32", (-1, -1)),
    Tensor("prompt_ranks", "INT32", (-1,)),
)

FOR_POSTPROCESSING = {"context_ids", "text_cut_bytes"}  # only the model postprocessing uses these
# output_log_probs has one value for each token of a response. The other two have as many values
# for each token as the request's top_logprobs.
OF_LOGPROBS = {"output_log_probs", "top_token_ids", "top_log_probs"}
# Only the first response has them. Without prompt_logprobs, `prompt_ids` is sent if named, and the
# others are empty.
PROMPT_OUTPUTS = tuple(output.name for output in OUTPUTS if output.name.startswith("prompt_"))

# Sent without the batch dimension, because clients of TensorRT-LLM read `text_output[0]`.
UNBATCHED_OUTPUTS = {"text_output"}

# Request parameters (KServe `parameters`). A request with any other parameter is rejected.
PARAMETERS = {
    "request_priority": "int: a request with a priority below 0 is rejected earlier under load",
    "tenant": "string: salts the block keys, so tenants never share KV. If API keys are "
    "configured, only the gateway may set it",
    "cache_salt": "string: requests share KV only if their salts and tenants are equal",
    "timeout_ms": "int: milliseconds after which the request is ended",
    "id": "string: request id, as in Triton's /generate. A request id outside the parameters wins",
    "traceparent": "string: W3C trace context of the request; an invalid one is ignored",
    "prefill_worker": "string: use this prefill worker (debugging, benchmarks)",
    "decode_worker": "string: use this decode worker (debugging, benchmarks)",
    "describe": "bool: return the service's properties as JSON instead of generating. Triton still "
    "requires one input, such as stream. The string cluster returns workers, hot prefixes and the "
    "latest decisions; if API keys are configured, only to the gateway",
    "tenant_proof": "string: the gateway's proof of `tenant`, if API keys are configured",
}
# Parameters that Triton's own HTTP and gRPC services add to a request.
TRITON_PARAMETERS = {"triton_enable_empty_final_response", "binary_data_output", "headers"}


def refusals(inputs: dict[str, np.ndarray]) -> list[str]:
    """A problem for each unsupported input that is not empty and not its neutral value."""
    found = []
    for tensor in UNSUPPORTED_INPUTS:
        value = inputs.get(tensor.name)
        if value is None or value.size == 0:
            continue
        asks = tensor.neutral is None or any(item != tensor.neutral for item in value.ravel())
        if asks:
            neutral = "an empty string" if tensor.neutral == b"" else tensor.neutral
            only = "" if neutral is None else f"; leave it out or send {neutral}"
            found.append(f"{tensor.name} is not supported by this server{only}")
    return found


def guide_name(kind: str) -> str:
    """The input that has a grammar of this kind, for errors."""
    return "guided_json" if kind == JSON_SCHEMA else "guided_decoding_guide"


def string_tensor(data: bytes | str) -> np.ndarray:
    """A tensor of one STRING element, in Triton's form."""
    return np.array([data], dtype=np.object_)
