"""Our connector, the stand-in's base classes and connectors of others agree on the API.

TensorRT-LLM itself cannot be installed here. What its base classes look like is recorded in
backends/doctor/contract/api.json. Connectors that are known to work with it are witnesses that this
is right.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.doctor.contract.recorded import Method, read
from backends.engine.trtllm.releases import kv_manager_of

DATA = Path(__file__).resolve().parents[3] / "data"
OUR_FILES = DATA.parents[1] / "backends" / "engine"
WITNESSES: list[dict[str, Any]] = json.loads((DATA / "trtllm_witnesses.json").read_text())
PLACES = {
    "1.4": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "1.3": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "1.2": "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
}
OURS_OF_REQUESTS = ("trtllm/connector.py", "trtllm/scheduler.py", "connected/scheduler.py")
OURS = {
    "KvCacheConnectorScheduler": "MooncakeConnectorScheduler",
    "KvCacheConnectorWorker": "MooncakeConnectorWorker",
}


def arguments_of(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)


def api(base: str, release: str) -> dict[str, Method]:
    (piece,) = [each for each in read(kv_manager_of(release)).pieces if each.name == base]
    return piece.methods


@pytest.mark.parametrize("base", OURS)
def test_our_methods_have_the_arguments_of_the_api(base: str, trtllm: str) -> None:
    module = importlib.import_module("backends.engine.trtllm.connector")
    ours = getattr(module, OURS[base])
    assert ours.__mro__[1].__name__ == base
    for name, method in api(base, trtllm + ".0").items():
        assert arguments_of(getattr(ours, name)) == method.arguments, name
    assert not getattr(ours, "__abstractmethods__", None), "it could not be built"


@pytest.mark.parametrize("base", OURS)
def test_the_stand_in_has_the_api_at_one_place(base: str, trtllm: str) -> None:
    theirs = getattr(importlib.import_module(PLACES[trtllm]), base)
    wanted = api(base, trtllm + ".0")
    for name, method in wanted.items():
        assert arguments_of(getattr(theirs, name)) == method.arguments, name
    assert theirs.__abstractmethods__ == {n for n, method in wanted.items() if method.is_abstract}
    (elsewhere,) = set(PLACES.values()) - {PLACES[trtllm]}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(elsewhere)


@pytest.mark.parametrize("witness", WITNESSES, ids=lambda each: f"{each['wheel']}-{each['class']}")
def test_a_working_connector_has_the_methods_that_are_written_down(witness: dict[str, Any]) -> None:
    known = api(witness["base"], "1.4.0")
    for name, arguments in witness["methods"].items():
        if name in known and name != "__init__":
            assert tuple(arguments) == known[name].arguments, name
    abstract = {name for name, method in known.items() if method.is_abstract}
    assert abstract <= witness["methods"].keys()
    assert witness["module"][0] in PLACES.values()
    assert witness["methods"]["__init__"][:2] == ["self", "llm_args"]


def test_both_places_of_the_api_have_witnesses() -> None:
    assert {module for each in WITNESSES for module in each["module"]} == set(PLACES.values())


def test_we_use_nothing_of_a_request_that_no_witness_uses() -> None:
    """Beyond it only attributes that may be missing (getattr with a default)."""
    ours = {name for file in OURS_OF_REQUESTS for name in uses_in(file)}
    must_be_seen = {
        "request_id",
        "get_tokens",
        "new_requests",
        "cached_requests",
        "new_block_ids",
        "computed_position",
        "num_scheduled_tokens",
    }
    assert must_be_seen <= ours, "does our code call TensorRT-LLM's things by other names now?"
    assert ours <= {name for each in WITNESSES for name in each["uses"]}


def uses_in(file: str) -> set[str]:
    """Attributes of what TensorRT-LLM hands in, by the names that our code gives it."""
    tree = ast.parse((OUR_FILES / file).read_text())
    return {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id in ("request", "data", "scheduler_output")
    }


def test_without_tensorrt_llm_the_connector_can_be_imported_and_loads_no_torch() -> None:
    code = (
        "import sys, backends.engine.trtllm.connector as c; "
        "print(c.MooncakeConnectorWorker.__mro__[1].__module__, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=DATA.parents[1],
    )
    assert done.stdout.split() == ["backends.engine.trtllm.connector", "False"]
