"""Prints docs/reference/parameters.md: `python -m tools.parameter_docs`.

Types, defaults and choices come from the classes that read a config.pbtxt, shipped values from the
model repository; a test compares the page with this output.

Not here: the meanings of parameters (parameter_meanings.py), keys of a cluster file
(docs/reference/cluster.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backends.config_pbtxt import (
    KIND_NAMES,
    OLD_NAMES,
    DecodeConfig,
    FrontendConfig,
    PrefillConfig,
    TokenizerConfig,
    WorkerConfig,
)
from backends.engine.trtllm.settings import TrtllmConfig
from backends.engine.vllm.settings import VllmConfig
from backends.model_settings.differences import read
from backends.model_settings.model_file import ModelFile, read_model_file
from backends.model_settings.repository_files import read_texts
from backends.shipped import shipped_repository
from conductor.config import CHOICES, MAY_BE_0, SHARES, ConductorConfig
from tools.parameter_meanings import (
    CONDUCTOR,
    DECODE,
    FRONTEND,
    PREFILL,
    TRTLLM,
    VLLM,
    WORKER,
    ParameterMeaning,
)

HEAD = """# Parameters

Made by `python -m tools.parameter_docs > docs/reference/parameters.md` of the
classes that read them; a test holds it up to date.

Each is a `parameters` entry of a `model_repository/*/config.pbtxt`, always as a string:

```text
parameters { key: "chunk_tokens" value { string_value: "256" } }
```

`mooncake config set 'prefill_*.chunk_tokens=256'` writes it, `mooncake config check` names every
mistake, `mooncake config diff` what is not a default
([how](../../model_repository/README.md#editing)). A parameter that is not listed for its model is
refused by name. The keys of a cluster file, whose pools and `conductor` take these parameters
too: [cluster.md](cluster.md).
"""

TOGETHER = """`checkpoint`, `engine`, `dtype`, `kv_dtype` and `block_tokens` are a worker's
*fingerprint*, with TensorRT-LLM and vLLM `tp_size` and `page_tokens` too, with TensorRT-LLM also
`handoff`: all workers of a pool have the same, and they are changed with the server stopped. With
`dtype` bfloat16, a CPU with AVX-512 and a C compiler computes between the matrices in float32, and
others do not: both kinds of hosts cannot be in one pool."""

STAGES = """The stages of a group have one `checkpoint`, `dtype`, `kv_dtype`, `block_tokens`,
`kv_bytes`, `context_tokens_max` and `chunk_tokens`, and the torch engine; they may be on other
hosts. A stage that starts and finds one that differs does not load; one that changes while it is
served only waits, so that all can be changed. While a stage is missing the group takes no
requests."""

OF_TRTLLM = """With another engine they are refused as unknown. None of this has run on a GPU
([what has run where](../../deploy/README.md#what-has-run-where)).

There `kv_bytes` is KV memory on the GPU and, once more, of the staging pool in `/dev/shm`;
`chunk_tokens` and `slots` are TensorRT-LLM's `max_num_tokens` and `max_batch_size`; `device` and
`threads` mean nothing. `stop_words`, `end_id` and streaming work as with torch; sampled tokens
(not greedy ones) are drawn by TensorRT-LLM's own sampler, so a request that moves to another
worker goes on with other tokens than it would have had. Penalties, `min_p` and seeds that the
installed release would ignore are refused ([which](../from-inflight-batcher-llm.md#sampling))."""

OF_VLLM = """With another engine they are refused as unknown. vLLM 0.32 or 0.33 runs in processes of
its own, so far on CPUs only ([what has run where](../../deploy/README.md#what-has-run-where)).

`kv_bytes` is vLLM's KV memory and, once more, a staging pool in `/dev/shm`. `chunk_tokens` and
`slots` are its `max_num_batched_tokens` and `max_num_seqs`, `threads` its threads on CPUs. Sampled
tokens (not greedy ones) are drawn by vLLM, so a request that another worker resumes has
other tokens than it would have had. Log probabilities of prompts are refused, and those of output
tokens together with a grammar."""

DECISIONS = """`conductor/config.py` has the reason for each default. All numbers must be finite."""


@dataclass(frozen=True, slots=True)
class ReferenceSection:
    title: str
    text: str
    config: type[Any]
    rows: tuple[ParameterMeaning, ...]
    backends: tuple[str, ...]  # of the models that have them


SECTIONS = (
    ReferenceSection(
        "Workers: `prefill_*` and `decode_*`", TOGETHER, WorkerConfig, WORKER, ("prefill", "decode")
    ),
    ReferenceSection(
        "Only `prefill_*`, and workers with `roles` `both`",
        STAGES,
        PrefillConfig,
        PREFILL,
        ("prefill",),
    ),
    ReferenceSection(
        "Only `decode_*`, and workers with `roles` `both`", "", DecodeConfig, DECODE, ("decode",)
    ),
    ReferenceSection(
        "Only workers with `engine` `tensorrt_llm`",
        OF_TRTLLM,
        TrtllmConfig,
        TRTLLM,
        ("prefill", "decode"),
    ),
    ReferenceSection(
        "Only workers with `engine` `vllm`", OF_VLLM, VllmConfig, VLLM, ("prefill", "decode")
    ),
    ReferenceSection("`conductor`: the frontend", "", FrontendConfig, FRONTEND, ("conductor",)),
    ReferenceSection(
        "`conductor`: the decisions", DECISIONS, ConductorConfig, CONDUCTOR, ("conductor",)
    ),
    ReferenceSection(
        "`preprocessing` and `postprocessing`",
        "`ensemble` has none.",
        TokenizerConfig,
        FRONTEND[:1],
        ("preprocessing", "postprocessing"),
    ),
)


def page() -> str:
    files = [
        read_model_file(model, text)
        for model, text in sorted(read_texts(shipped_repository()).items())
    ]
    lines = [HEAD]
    for section in SECTIONS:
        lines += [f"## {section.title}", ""]
        lines += [section.text, ""] if section.text else []
        lines += ["| parameter | type | default | may be | meaning |", "|-|-|-|-|-|"]
        lines += [_row(section, row, files) for row in section.rows]
        lines.append("")
    lines += ["## Names of before", ""]
    lines += [
        f"`{old}` is read as `{new}`, with a warning, for one release."
        for old, new in OLD_NAMES.items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def _row(section: ReferenceSection, row: ParameterMeaning, files: list[ModelFile]) -> str:
    fields = {field.name: field for field in dataclasses.fields(section.config)}
    field = fields[row.name]
    kind, default = str(field.type), field.default
    shipped = {
        file.model: file.parameters[row.name]
        for file in files
        if file.backend in section.backends and row.name in file.parameters
    }
    others = _other_values(kind, default, shipped)
    values = "; ".join([_value(default), *others])
    may_be = row.limits or limits_of(row.name, kind)
    return f"| `{row.name}` | {KIND_NAMES.get(kind, kind)} | {values} | {may_be} | {row.meaning} |"


def _other_values(kind: str, default: object, shipped: Mapping[str, str]) -> Iterator[str]:
    """Shipped values that differ from the default, with the models that have them."""
    models: dict[str, list[str]] = {}
    for model, text in shipped.items():
        if read(kind, text) != default:
            models.setdefault(text, []).append(f"`{model}`")
    for text, having in models.items():
        yield f"shipped `{text}` in {', '.join(having)}"


def _value(default: object) -> str:
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`" if default != "" else "empty"


def limits_of(name: str, kind: str) -> str:
    """Limits of the conductor's parameters, as ConductorConfig.problems checks them."""
    if kind == "bool":
        return "`true`, `false`"
    if kind == "SecondsOrAuto":
        return "above 0, or `auto`"
    if name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[name])
    if name in SHARES:
        return "0 to 1" if name in MAY_BE_0 else "above 0, to 1"
    return "0 or more" if name in MAY_BE_0 else "above 0"


if __name__ == "__main__":
    print(page(), end="")
