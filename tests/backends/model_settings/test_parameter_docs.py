"""The reference of parameters says what the classes say: names, defaults, choices and limits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.config_pbtxt import DecodeConfig, PrefillConfig, check_configs
from tools import parameter_docs
from tools.parameter_docs import SECTIONS, ReferenceSection, limits_of
from tools.parameter_meanings import ParameterMeaning

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "parameters.md"
FOR_WORKERS = ("prefill", "decode")
ROWS = [(section, row) for section in SECTIONS for row in section.rows]
IDS = [f"{section.config.__name__}-{row.name}" for section, row in ROWS]
# Limits that are checked against a checkpoint or the host, or that are texts.
IN_WORDS = {
    "checkpoint",
    "kv_bytes",
    "store_node",
    "engine_python",
    "gpus",
    "llm_options",
    "vllm_options",
    "recording_folder",
    "pipeline_group",
}
# What must be set beside a parameter so that only its own limit is tried.
BESIDE = {
    "pipeline_stage": {"pipeline_group": "g"},
    "pipeline_stages": {"pipeline_group": "g"},
    "lease_s": {"transfer_s_max": "0.5"},
}


def test_the_page_is_what_the_generator_prints() -> None:
    command = "python -m tools.parameter_docs > docs/reference/parameters.md"
    assert PAGE.read_text() == parameter_docs.page(), command


def test_every_parameter_has_one_row_and_no_row_is_of_nothing() -> None:
    for section in SECTIONS:
        names = [row.name for row in section.rows]
        fields = [field.name for field in dataclasses.fields(section.config)]
        assert len(names) == len(set(names)) and set(names) <= set(fields), section.title
        if not (section.config in (PrefillConfig, DecodeConfig) or "Workers" in section.title):
            assert set(names) == set(fields), section.title
    rows = {
        role: {row.name for section in SECTIONS if role in section.backends for row in section.rows}
        for role in FOR_WORKERS
    }
    prefill, decode = (
        {field.name for field in dataclasses.fields(config)}
        for config in (PrefillConfig, DecodeConfig)
    )
    assert prefill <= rows["prefill"], prefill - rows["prefill"]
    assert decode <= rows["decode"] | rows["prefill"], decode - rows["decode"]


def complaints(section: ReferenceSection, name: str, value: str) -> list[str]:
    _, found = check_configs((section.config,), {name: value, **BESIDE.get(name, {})})
    return [line for line in found if name in line]


def bounds(limits: str, kind: str) -> Iterator[tuple[float, float]]:
    """Of limits in words: the last value that is taken, and one beyond it."""
    step = 1.0 if kind == "int" else 1e-6
    for least in re.findall(r"^(-?[\d.]+) (?:to|or more)|, (-?[\d.]+) or more", limits):
        bound = float(least[0] or least[1])
        yield bound, bound - step
    for above in re.findall(r"^above ([\d.]+)", limits):
        yield float(above) + step, float(above)
    for most in re.findall(r"to (\d[\d.]*)$", limits):
        yield float(most), float(most) + step
    for below in re.findall(r"below (\d[\d.]*)$", limits):
        yield float(below) - step, float(below)


def written(value: float, kind: str) -> str:
    return str(int(value)) if kind == "int" else repr(value)


@pytest.mark.parametrize(("section", "row"), ROWS, ids=IDS)
def test_the_limits_of_a_row_are_those_of_the_class(
    section: ReferenceSection, row: ParameterMeaning
) -> None:
    kind = str({field.name: field for field in dataclasses.fields(section.config)}[row.name].type)
    defaults = {field.name: field.default for field in dataclasses.fields(section.config)}
    limits = re.sub(
        r"`(\w+)`",
        lambda found: str(defaults[found[1]]) if found[1] in defaults else found[0],
        row.limits or limits_of(row.name, kind),
    )
    tried = 0
    choices = re.findall(r"`([\w:]+)`", limits) if kind == "str" else []
    if row.name not in IN_WORDS and choices and row.name not in ("device", "dtype"):
        tried += 1
        assert complaints(section, row.name, "none of them")
        assert not any(complaints(section, row.name, choice) for choice in choices)
    if kind == "bool":
        tried += 1
        assert complaints(section, row.name, "none of them")
        assert not any(complaints(section, row.name, choice) for choice in choices)
    for taken, refused in bounds(limits, kind):
        tried += 1
        assert not complaints(section, row.name, written(taken, kind)), (limits, taken)
        assert complaints(section, row.name, written(refused, kind)), (limits, refused)
    others = {"device", "dtype", "tenant_shares", "chunk_tokens", "page_tokens"}
    assert tried or row.name in IN_WORDS | others, f"{row.name}: nothing of {limits!r} was tried"
    if kind == "float":
        assert complaints(section, row.name, repr(math.nan)), f"{row.name} takes nan"


def test_choices_with_a_number_or_an_engine_are_those_of_the_class() -> None:
    section = next(each for each in SECTIONS if each.config.__name__ == "WorkerConfig")
    for device in ("cpu", "cuda", "cuda:1"):
        assert not complaints(section, "device", device)
    assert complaints(section, "device", "tpu")
    for dtype in ("float32", "bfloat16"):
        assert not complaints(section, "dtype", dtype)
    assert complaints(section, "dtype", "float16"), "with tensorrt_llm and vllm only"
