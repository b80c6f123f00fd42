"""Converts the model.yaml of TensorRT-LLM's Triton model `llmapi` to parameters of our models.

Each field becomes a parameter, a keyword in `llm_options`, or is left out for a reason. One row per
field records the outcome. Mistakes are collected, and reported together with their lines: YAML that
cannot be read, unknown fields, values of a wrong type. Upstream's model is one engine; here its
settings become those of one prefill and one decode worker.

Not here: which fields exist (llmapi_fields.py), the folder that is made (command.py).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from backends.cluster.model_rendering import ROLES, backend_named, parameters_of, with_parameters
from backends.cluster.section import YamlEntry, YamlInvalid, read_tree
from backends.config_pbtxt import CONNECTED_DTYPES
from backends.engine.model_config import CheckpointError, read_config
from backends.engine.trtllm.kv_shape import read_kv_dtype, read_kv_shape
from backends.engine.trtllm.settings import ONLY, TrtllmConfig
from backends.errors import ConfigError
from backends.model_settings.model_file import read_model_file
from backends.model_settings.repository_check import model_mistakes
from backends.starter.llmapi_fields import (
    DECODE_ONLY,
    FRACTION,
    LEFT_OUT,
    OBJECTS,
    OTHER_NAMES,
    all_names,
    is_known,
)

CONDUCTOR = "conductor"
WORKERS = ("prefill_0", "decode_0")  # models with a worker, by role; others are not written
BLOCK_TOKENS = 256  # a store block; a multiple of the engine's page
KV_BYTES = {"prefill": "16G", "decode": "32G"}  # if the file does not bound KV by tokens
CHUNK_TOKENS = 8192  # the default of max_num_tokens upstream
SLOTS = 128  # of decode, if the file has no max_batch_size
SLOTS_MAX = 4096  # most that the parameter slots may be
PAGE_TOKENS = TrtllmConfig().page_tokens
DTYPE = "bfloat16"  # if neither the file nor the checkpoint names one
COMMENT = "Of the engine tensorrt_llm: docs/reference/parameters.md."
NOT_IN_FILE = "-"


class LlmapiRefused(Exception):
    """The file cannot be converted. `problems` has one line for each mistake."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{path}:" + "".join(f"\n  {line}" for line in problems))


@dataclass(frozen=True, slots=True)
class LlmapiField:
    name: str  # with a dot before the key of an object, as in kv_cache_config.dtype
    value: Any  # as YAML has it
    line: int  # in the file, counted from 1

    @property
    def shown(self) -> str:
        value = self.value if isinstance(self.value, str) else json.dumps(self.value, default=str)
        return f"{self.name}: {value}"


@dataclass(slots=True)
class LlmapiConversion:
    """Parameters of our models, and what became of each field."""

    of_role: dict[str, dict[str, str]]  # role -> parameters of its worker, with the engine's
    conductor: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)  # (field, outcome) in file order

    def table(self) -> Iterator[str]:
        """The rows as text in two columns."""
        rows = [("model.yaml", "here"), *self.rows]
        width = min(max(len(shown) for shown, _ in rows), 60)
        for shown, outcome in rows:
            cut = shown if len(shown) <= width else shown[: width - 3] + "..."
            yield f"{cut:{width}}  {outcome}"


def read_fields(path: Path) -> list[LlmapiField]:
    """The fields of a file in their order. Raises LlmapiRefused with every mistake, or OSError."""
    try:
        text = path.read_text("utf-8")
        entry, found = read_tree(text)
        problems = [f"line {line}: {what}" for line, what in found]
        if entry.keys is None:
            problems.append(f"line {entry.line}: expected fields, such as model: ...")
        if problems:
            raise LlmapiRefused(path, problems)
        values = yaml.safe_load(text)
    except YamlInvalid as error:
        raise LlmapiRefused(path, [str(error)]) from None
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist, bytes not UTF-8
        raise LlmapiRefused(path, [f"cannot be read: {error}"]) from None
    named = list(_flat({str(name): value for name, value in values.items()}, entry))
    if unknown := [each for each in named if not is_known(each.name)]:
        raise LlmapiRefused(path, [_unknown(each) for each in unknown])
    return named


def _flat(values: Mapping[str, Any], entry: YamlEntry) -> Iterator[LlmapiField]:
    for name, value in values.items():
        line = entry.key_lines.get(name, entry.line)
        if name in OBJECTS and isinstance(value, Mapping):
            inner = (entry.keys or {}).get(name, entry)
            for key, each in value.items():
                at = inner.key_lines.get(str(key), line)
                yield LlmapiField(f"{name}.{key}", each, at)
        else:
            yield LlmapiField(name, value, line)


def _unknown(each: LlmapiField) -> str:
    near = difflib.get_close_matches(each.name, all_names(), 1)
    remedy = f"did you mean {near[0]}?" if near else "remove it, and add it to llm_options later"
    return f"line {each.line}: {each.name} is no known field of TensorRT-LLM; {remedy}"


def checkpoint_of(path: Path, named: list[LlmapiField], folder: Path | None) -> Path:
    """The folder with the model: `folder`, or else that of the field `model`. Raises LlmapiRefused
    if there is none."""
    if folder is not None:
        given = folder.expanduser().resolve()
        if (given / "config.json").is_file():
            return given
        raise LlmapiRefused(path, [f"--checkpoint {folder} has no config.json: name a checkpoint"])
    model = next((each for each in named if each.name == "model"), None)
    if model is None:
        raise LlmapiRefused(path, ["names no model: name its folder with --checkpoint"])
    local = Path(str(model.value)).expanduser().resolve()
    if local.is_dir():
        return local
    raise LlmapiRefused(
        path,
        [
            f"line {model.line}: model is {model.value!r}, which is no folder here: fetch it, for "
            f"example by `hf download {model.value} --local-dir DIR`, and add --checkpoint DIR"
        ],
    )


def convert(path: Path, named: list[LlmapiField], checkpoint: Path) -> LlmapiConversion:
    """Raises LlmapiRefused with all values of a wrong type."""
    converter = _Converter(named, checkpoint)
    for each in named:
        converter.take(each)
    converter.complete()
    if converter.problems:
        raise LlmapiRefused(path, converter.problems)
    return converter.found


class _Converter:
    def __init__(self, named: list[LlmapiField], checkpoint: Path) -> None:
        self.found = LlmapiConversion({"prefill": {}, "decode": {}})
        self.problems: list[str] = []
        self._values = {OTHER_NAMES.get(each.name, each.name): each.value for each in named}
        self._checkpoint = checkpoint
        self._options: dict[str, Any] = {}  # llm_options of both workers
        self._of_decode: dict[str, Any] = {}  # further llm_options of the decode worker
        # Field -> method that returns the outcome as text.
        self._makers: Mapping[str, Callable[[LlmapiField], str]] = {
            "model": lambda each: self._set("checkpoint", str(checkpoint)),
            "tensor_parallel_size": self._tensor_parallel,
            "dtype": self._dtype,
            "model_kwargs.torch_dtype": self._dtype,
            "model_kwargs.dtype": self._dtype,
            "max_batch_size": self._slots,
            "max_num_tokens": self._chunk,
            "max_seq_len": lambda each: self._set("context_tokens_max", str(self._whole(each))),
            "kv_cache_config.tokens_per_block": self._page,
            "kv_cache_config.max_tokens": self._kv_tokens,
            "kv_cache_config.dtype": self._kv_dtype,
            FRACTION: lambda each: self._set("gpu_memory_fraction", str(self._number(each))),
            "triton_config.cancellation_check_period_ms": self._cancel_poll,
        }

    def take(self, each: LlmapiField) -> None:
        name = OTHER_NAMES.get(each.name, each.name)
        if each.value is None and name not in DECODE_ONLY:
            outcome = "left out: no value, so the default"
        elif name in self._makers:
            outcome = self._makers[name](each)
        elif name in LEFT_OUT:
            outcome = f"left out: {LEFT_OUT[name]}"
        elif name in ONLY:
            allowed, why = ONLY[name]
            outcome = "left out: the only value here"
            if each.value not in allowed:
                outcome = f"left out, here {json.dumps(allowed[0])}: {why}"
        elif name in OBJECTS:
            outcome = f"left out: {self._mistake(each, 'an object with keys')}"
        else:
            outcome = self._option(name, each.value)
        self.found.rows.append((each.shown, outcome))

    def complete(self) -> None:
        """Set what the file does not have."""
        self._note_default("checkpoint", str(self._checkpoint), "of --checkpoint")
        self._note_default("dtype", *self._own_dtype())
        self.found.of_role["prefill"].setdefault("chunk_tokens", str(CHUNK_TOKENS))
        self.found.of_role["decode"].setdefault("slots", str(SLOTS))
        if "kv_bytes" not in self.found.of_role["prefill"]:
            for role, size in KV_BYTES.items():
                self.found.of_role[role]["kv_bytes"] = size
            sizes = " and ".join(f"{size} ({role})" for role, size in KV_BYTES.items())
            self._note(f"kv_bytes = {sizes}: on the GPU and again in /dev/shm; set your own")
        self._set("block_tokens", str(self._block_tokens))
        degree = self._positive("tensor_parallel_size", 1)
        for number, role in enumerate(ROLES):
            options = self._options | (self._of_decode if role == "decode" else {})
            parameters = self.found.of_role[role]
            gpus = range(number * degree, (number + 1) * degree)
            parameters["gpus"] = ",".join(map(str, gpus))
            if options:
                try:
                    parameters["llm_options"] = json.dumps(options, allow_nan=False)
                except (TypeError, ValueError) as error:  # dates, infinity
                    self.problems.append(f"a value is not JSON: {error}")

    def _set(self, name: str, value: str, role: str = "") -> str:
        for each in (role,) if role else ROLES:
            self.found.of_role[each][name] = value
        return f"{name} = {value}" + (f" of {role}_0" if role else "")

    def _note(self, outcome: str) -> None:
        self.found.rows.append((NOT_IN_FILE, outcome))

    def _note_default(self, name: str, value: str, source: str) -> None:
        if name not in self.found.of_role["prefill"]:
            self._note(f"{self._set(name, value)}: {source}")

    def _mistake(self, each: LlmapiField, wanted: str) -> str:
        value = json.dumps(each.value, default=str)
        self.problems.append(f"line {each.line}: {each.name} is {value}; expected {wanted}")
        return "wrong value"

    def _whole(self, each: LlmapiField) -> int:
        """The value, or 1 after noting that it is no whole number from 1."""
        if isinstance(each.value, int) and not isinstance(each.value, bool) and each.value > 0:
            return each.value
        self._mistake(each, "a whole number, 1 or more")
        return 1

    def _number(self, each: LlmapiField) -> float:
        if isinstance(each.value, (int, float)) and not isinstance(each.value, bool):
            return each.value
        self._mistake(each, "a number")
        return 0.0

    def _tensor_parallel(self, each: LlmapiField) -> str:
        degree = self._whole(each)
        return f"{self._set('tp_size', str(degree))}, gpus of each worker"

    def _dtype(self, each: LlmapiField) -> str:
        if each.value == "auto":
            dtype, source = self._own_dtype()
            return f"{self._set('dtype', dtype)}: {source}"
        if each.value not in CONNECTED_DTYPES:
            return self._mistake(each, f"auto, {', '.join(CONNECTED_DTYPES)}")
        return self._set("dtype", each.value)

    def _own_dtype(self) -> tuple[str, str]:
        """The checkpoint's dtype or the default, and which of these it is."""
        raw, _ = read_config(self._checkpoint, [])
        dtype = str((raw or {}).get("dtype") or (raw or {}).get("torch_dtype") or "")
        if dtype in CONNECTED_DTYPES:
            return dtype, "of the checkpoint"
        return DTYPE, "the checkpoint names none"

    def _slots(self, each: LlmapiField) -> str:
        asked = self._whole(each)
        outcome = self._set("slots", str(min(asked, SLOTS_MAX)), "decode")
        return outcome if asked <= SLOTS_MAX else f"{outcome}, the most"

    @property
    def _block_tokens(self) -> int:
        return max(self._positive("kv_cache_config.tokens_per_block", PAGE_TOKENS), BLOCK_TOKENS)

    def _positive(self, name: str, default: int) -> int:
        value = self._values.get(name)
        return value if isinstance(value, int) and value > 0 else default

    def _chunk(self, each: LlmapiField) -> str:
        asked, block = self._whole(each), self._block_tokens
        chunk = max(asked // block, 1) * block
        outcome = self._set("chunk_tokens", str(chunk), "prefill")
        whole = f"{outcome}: at least one, and whole blocks of {block} tokens"
        return outcome if chunk == asked else whole

    def _page(self, each: LlmapiField) -> str:
        return self._set("page_tokens", str(self._whole(each)))

    def _kv_tokens(self, each: LlmapiField) -> str:
        """KV memory for this number of tokens, if config.json has the shape of KV."""
        tokens, block = self._whole(each), self._block_tokens
        degree = self._positive("tensor_parallel_size", 1)
        try:
            shape = read_kv_shape(self._checkpoint, degree)
        except CheckpointError as error:
            return f"left out, set kv_bytes: {'; '.join(error.problems)}"
        dtype = self._values.get("dtype") or "auto"
        dtype = self._own_dtype()[0] if dtype not in CONNECTED_DTYPES else dtype
        asked = "fp8" if self._values.get("kv_cache_config.dtype") == "fp8" else "auto"
        kv_dtype = read_kv_dtype(self._checkpoint, asked, dtype, [])
        blocks = max(-(-tokens // block), 2)
        size = blocks * shape.layout(kv_dtype, block, degree).block_bytes
        return f"{self._set('kv_bytes', str(size))}: {blocks} blocks of {block} tokens"

    def _kv_dtype(self, each: LlmapiField) -> str:
        if each.value in ("auto", "fp8"):
            return self._set("kv_dtype", each.value)
        if each.value == "nvfp4":
            return "left out: NVFP4 has scales beside the pages; KV is kept as kv_dtype auto"
        if each.value in CONNECTED_DTYPES:
            return "left out: KV that is not fp8 has the dtype of the weights"
        return self._mistake(each, "auto or fp8")

    def _cancel_poll(self, each: LlmapiField) -> str:
        seconds = min(max(self._number(each) / 1000, 0.01), 1.0)
        self.found.conductor["cancel_poll_s"] = f"{seconds:g}"
        return f"cancel_poll_s = {seconds:g} of {CONDUCTOR}"

    def _option(self, name: str, value: Any) -> str:
        options = self._of_decode if name in DECODE_ONLY else self._options
        owner, _, key = name.partition(".")
        if key:
            options.setdefault(owner, {})[key] = value
        else:
            options[name] = value
        return "llm_options" + (" of decode_0" if name in DECODE_ONLY else "")


def converted_models(templates: Mapping[str, str], found: LlmapiConversion) -> dict[str, str]:
    """Model -> text of its config.pbtxt, made from the shipped models. Only one worker of each role
    is written, because each needs GPUs of its own."""
    defaults = {each.name: str(each.default) for each in fields(TrtllmConfig)}
    texts: dict[str, str] = {}
    for model, text in templates.items():
        role = backend_named(text)
        if role in ROLES and model not in WORKERS:
            continue
        parameters = found.conductor if role == CONDUCTOR else {}
        if role in ROLES:
            parameters = {"engine": "tensorrt_llm", **defaults, **found.of_role[role]}
            parameters["store_node"] = "s0"
        elif "checkpoint" in parameters_of(text):
            parameters = {**parameters, "checkpoint": found.of_role["prefill"]["checkpoint"]}
        texts[model] = with_parameters(text, parameters, COMMENT)
    return texts


def refuse_mistakes(path: Path, texts: Mapping[str, str]) -> None:
    """Raises LlmapiRefused with what the models would refuse when they load."""
    found = []
    for model, text in texts.items():
        try:
            found += [f"{model}: {what}" for what in model_mistakes(read_model_file(model, text))]
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise LlmapiRefused(path, found)
