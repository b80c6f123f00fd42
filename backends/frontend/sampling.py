"""How a request's answer is sampled and where it ends: the rules for what is not said.

| said | means |
|---|---|
| nothing about sampling | greedy (temperature 0) |
| `temperature` 0, or `top_k` 1 | greedy, whatever else is set |
| `top_k` (not 0), `top_p` or `min_p` (not 0), but no `temperature` | temperature 1, as in vLLM |
| no `seed` (`random_seed`) | seed 0, as in TensorRT-LLM: the same request, the same answer |
| no `max_tokens` | the front's default, or `min_tokens` if larger, but no more than fits |
| `max_tokens` | exactly that; refused, with the numbers, if the context cannot hold it |
| `min_length`, `random_seed` | older spellings; both spellings must agree |
| `end_id` -1, or `ignore_eos` | never end at a token; the answer has max_tokens tokens |
| `end_id` | ends at this token only, instead of the checkpoint's end tokens |
| `stop_words` [""] | none (TensorRT-LLM's examples write it so) |
| `sampling_parameters` | vLLM's JSON: the same names and `stop`; a tensor that differs wins |

Not here: the limits themselves (engine/sampling_params.py).
"""

from __future__ import annotations

from typing import Any

from backends.engine.sampling_params import SamplingLimits, SamplingParams
from backends.frontend import sampling_json
from backends.frontend.values import InputReader

NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
NEVER_ENDS = -1


def read(
    reader: InputReader, eos_ids: tuple[int, ...], limits: SamplingLimits, tokens_default: int
) -> SamplingParams:
    """Notes every broken limit in `reader`; the result counts only if there is none."""
    said = sampling_json.read(reader)
    said |= _tensors(reader)
    said.setdefault("temperature", 1.0 if _wants_sampling(said) else 0.0)
    if "max_tokens" not in said:
        wanted = max(tokens_default, said.get("min_tokens", 0))
        said["max_tokens"] = max(min(wanted, limits.output_tokens_max), 1)
    end_ids = () if said.pop("ignore_eos", False) else eos_ids
    end_id = reader.integer("end_id")
    if end_id is not None:
        end_ids = () if end_id == NEVER_ENDS else (end_id,)
    reader.integer("pad_id")  # nothing is padded here; checked, then not used
    words = said.pop("stop", [])
    params = SamplingParams(
        **said, end_ids=end_ids, stop_words=() if words == [""] else tuple(words)
    )
    reader.problems += params.problems(limits)
    return params


def _tensors(reader: InputReader) -> dict[str, Any]:
    """What the tensors say, under the names of SamplingParams."""
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


def _wants_sampling(said: dict[str, Any]) -> bool:
    return bool(said.get("top_k") or said.get("min_p")) or "top_p" in said
