"""Reads a request's sampling parameters, from its tensors and its tensor `sampling_parameters`.

`sampling_parameters` is JSON, as in vLLM's Triton backend. The inputs and their defaults are in
model_repository/README.md (Tensors). Some rules:

* `temperature` defaults to 1, as in vLLM, if `top_p` is given, or if `top_k` or `min_p` is not 0.
  Otherwise it defaults to 0 (greedy).
* `seed` defaults to 0, as in TensorRT-LLM. So equal requests have equal answers.
* `stop_words` [""] means no stop words, as in TensorRT-LLM's examples.
* A tensor takes precedence over the same value in `sampling_parameters`.

Not here: limits of the values (engine/sampling_params.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from backends.engine.sampling_params import GUIDE_BYTES_MAX, SamplingLimits, SamplingParams
from backends.errors import InvalidRequest
from backends.frontend.inputs import (
    INTEGER_MAX,
    InputReader,
    as_text,
    did_you_mean,
    from_json,
    shown,
)
from backends.tensors import GUIDE_KINDS, JSON_SCHEMA
from backends.text import guides
from backends.text.json_schema import read_schema
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import NO_LOGPROBS, TOP_LOGPROBS_MAX

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
ANY_JSON = "json"  # a guided_decoding_guide_type that needs no guide, as in TensorRT-LLM
NEVER_ENDS = -1  # value of `end_id`: no token ends the answer
JSON_NAME = "sampling_parameters"
JSON_BYTES_MAX = 64 * 1024
TRUE, FALSE = ("true", "1"), ("false", "0")


def read(
    reader: InputReader, tokenizer: Tokenizer, limits: SamplingLimits, tokens_default: int
) -> SamplingParams:
    """The sampling parameters. They are invalid if `reader` has noted a problem."""
    given = _from_json(reader)
    given |= _tensors(reader)
    is_sampled = bool(given.get("top_k") or given.get("min_p")) or "top_p" in given
    given.setdefault("temperature", 1.0 if is_sampled else 0.0)
    if "max_tokens" not in given:
        wanted = max(tokens_default, given.get("min_tokens", 0))
        given["max_tokens"] = max(min(wanted, limits.output_tokens_max), 1)
    end_ids = () if given.pop("ignore_eos", False) else tokenizer.eos_ids
    end_id = reader.integer("end_id")
    if end_id is not None:
        end_ids = () if end_id == NEVER_ENDS else (end_id,)
    if (stop_ids := reader.values("stop_token_ids")) is not None:
        end_ids = tuple(dict.fromkeys((*end_ids, *stop_ids.tolist())))
    reader.integer("pad_id")  # only the type is checked, because nothing is padded
    words = given.pop("stop", [])
    kind, guide = _guide(reader)
    params = SamplingParams(
        **given,
        end_ids=end_ids,
        stop_words=() if words == [""] else tuple(words),
        top_logprobs=_top_logprobs(reader),
        prompt_logprobs=_prompt_logprobs(reader),
        guide_kind=kind,
        guide=guide,
        shows_special=reader.has("skip_special_tokens") and not reader.flag("skip_special_tokens"),
    )
    found = params.problems(limits)
    if guide and not found:
        found += guide_problems(tokenizer, kind, guide, params.end_ids)
    if reader.has("guided_decoding_guide") and not reader.has("guided_json"):
        found = [each.replace("guided_json", "guided_decoding_guide", 1) for each in found]
    reader.problems += found
    return params


def _guide(reader: InputReader) -> tuple[str, str]:
    """(kind, text) of the grammar that the answer follows; the text is "" if it follows none."""
    schema = reader.text("guided_json", GUIDE_BYTES_MAX) or ""
    kind = reader.text("guided_decoding_guide_type", GUIDE_BYTES_MAX) or ""
    guide = reader.text("guided_decoding_guide", GUIDE_BYTES_MAX) or ""
    if kind == ANY_JSON:
        kind, guide = JSON_SCHEMA, "{}"
    if kind and kind not in GUIDE_KINDS:
        known = ", ".join((ANY_JSON, *GUIDE_KINDS))
        reader.note(f"guided_decoding_guide_type is {shown(kind)}; use {known}")
    elif bool(kind) != bool(guide):
        reader.note("guided_decoding_guide and guided_decoding_guide_type need each other")
    elif kind and schema:
        reader.note("guided_decoding_guide and guided_json exclude each other; send one")
    elif kind:
        return kind, guide
    return JSON_SCHEMA, schema


def guide_problems(
    tokenizer: Tokenizer, kind: str, guide: str, end_ids: Sequence[int]
) -> list[str]:
    """Why no worker can constrain an answer to this grammar; empty if a worker can.

    Without the optional package of guided decoding, this function checks only the keywords of a
    JSON schema. The prefill worker checks the rest before it computes.
    """
    if not guides.is_installed():
        found = read_schema(guide)[1] if kind == JSON_SCHEMA else []
        return [f"guided_json: {problem}" for problem in found]
    try:
        guides.guides_of(tokenizer).guide(guide, end_ids, [], kind)
    except InvalidRequest as error:
        return [str(error)]
    return []


def _tensors(reader: InputReader) -> dict[str, Any]:
    """Values given as tensors, by their names in SamplingParams."""
    found: dict[str, Any] = {name: reader.number(name) for name in NUMBERS}
    found["max_tokens"] = reader.integer("max_tokens")
    found["top_k"] = reader.integer("top_k")
    found["min_tokens"] = _either(reader, "min_tokens", "min_length")
    found["seed"] = _either(reader, "seed", "random_seed")
    found["stop"] = reader.texts("stop_words")
    return {name: value for name, value in found.items() if value is not None}


def _either(reader: InputReader, name: str, older: str) -> int | None:
    value, other = reader.integer(name), reader.integer(older)
    if value is not None and other is not None and value != other:
        reader.note(f"{name} is {value} but {older} is {other}; they mean the same, send one")
    return other if value is None else value


def _top_logprobs(reader: InputReader) -> int:
    is_wanted, top = reader.flag("return_log_probs"), reader.integer("top_logprobs") or 0
    if not 0 <= top <= TOP_LOGPROBS_MAX:
        reader.note(f"top_logprobs is {top}; use 0 to {TOP_LOGPROBS_MAX}")
    elif top and not is_wanted:
        reader.note(f"top_logprobs is {top}, but return_log_probs is not true; send both")
    elif is_wanted:
        return top
    return NO_LOGPROBS


def _prompt_logprobs(reader: InputReader) -> int:
    count = reader.integer("prompt_logprobs")
    if count is not None and not 0 <= count <= TOP_LOGPROBS_MAX:
        reader.note(f"prompt_logprobs is {count}; use 0 to {TOP_LOGPROBS_MAX}")
        return NO_LOGPROBS
    return NO_LOGPROBS if count is None else count


def _from_json(reader: InputReader) -> dict[str, Any]:
    """Values given in `sampling_parameters`, by their names and types in SamplingParams.

    Numbers may be strings ({"max_tokens": "6"}), as load generators for vLLM's backend send them.
    Unsupported keys are rejected by name.
    """
    text = reader.text(JSON_NAME, JSON_BYTES_MAX)
    if text is None or not text.strip():
        return {}
    content, problem = from_json(JSON_NAME, text)
    if not problem and not isinstance(content, dict):
        problem = f"{JSON_NAME} is {shown(content)}; send a JSON object"
    if problem:
        reader.note(problem)
        return {}
    reader.note_some(
        [
            f"{JSON_NAME}: {shown(key)} is not supported{did_you_mean(key, JSON_KEYS)}"
            for key in sorted(content.keys() - JSON_KEYS.keys())
        ]
    )
    found: dict[str, Any] = {}
    for key in JSON_KEYS:
        if content.get(key) is None:
            continue
        try:
            found[key] = JSON_KEYS[key](content[key])
        except (ValueError, OverflowError) as error:
            reader.note(f"{JSON_NAME}: {key} is {shown(content[key])}; {error}")
    if found.get("top_k") == -1:  # vLLM's value for all tokens
        found["top_k"] = 0
    return found


def _integer(value: Any) -> int:
    if isinstance(value, str):
        value = float(value) if "." in value or "e" in value.lower() else int(value)
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool) or abs(value) > INTEGER_MAX:
        raise ValueError("send a whole number")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("send a number")
    number = float(value)
    if math.isinf(number):
        raise ValueError("send a finite number")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    lowered = str(value).strip().lower()
    if lowered not in TRUE + FALSE:
        raise ValueError("send true or false")
    return lowered in TRUE


def _words(value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list):
        raise ValueError("send a string or a list of strings")
    read = [as_text("a stop word", word) for word in words]
    if problem := next((problem for _, problem in read if problem), ""):
        raise ValueError(problem)
    return [text for text, _ in read if text is not None]


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError("send an object")
    return tuple((_integer(key), _number(bias)) for key, bias in value.items())


JSON_KEYS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "seed": _integer,
    "stop": _words,
    "ignore_eos": _flag,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _biases,
}
