"""What `mooncake doctor` finds out about interpreters of vLLM, and what it advises."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from backends.doctor import vllm_interpreter
from backends.doctor.judgement import BROKEN, OK, vllm_findings
from backends.doctor.vllm_interpreter import VllmInterpreter, read_interpreter, read_interpreters
from backends.engine.interpreter import NEEDS, VLLM_SUPPORTED
from backends.model_settings.model_file import read_model_file
from tests.backends.model_settings.repositories import shipped_texts, with_value

ROOT = Path(__file__).resolve().parents[3]
OURS = ("backends", "conductor", "mooncake_store")
WORKERS = ("prefill_0",)


def interpreter_that(folder: Path, script: str) -> str:
    """An interpreter that runs `script` before each program."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def with_vllm(folder: Path, module: str) -> str:
    """An interpreter whose module `vllm` has this source."""
    (folder / "vllm.py").write_text(module)
    return interpreter_that(folder, f'PYTHONPATH="{folder}" exec {sys.executable} "$@"')


def test_each_interpreter_is_run_once_for_all_of_its_workers_on_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_interpreter, "read_interpreter", VllmInterpreter)
    texts = shipped_texts()
    added = 'parameters { key: "engine_python" value { string_value: "/opt/python" } }\n'
    for model in ("prefill_0", "prefill_1", "decode_1"):
        texts[model] = with_value(texts[model], "engine", "vllm") + added
    files = [read_model_file(model, text) for model, text in texts.items()]
    assert read_interpreters(files, tmp_path / "models") == [
        VllmInterpreter("/opt/python", ("decode_1", "prefill_0", "prefill_1"))
    ]


def test_an_interpreter_with_vllm_and_our_needs_is_well(tmp_path: Path) -> None:
    python = with_vllm(tmp_path, "print('INFO: a line of vLLM')\n__version__ = '0.33.0+cpu'")
    found = read_interpreter(python, WORKERS)
    assert found == VllmInterpreter(python, WORKERS, "0.33.0+cpu")
    assert [each.state for each in vllm_findings([found])] == [OK]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no libpython >&2; exit 3", "ended with status 3: no libpython"),
        ("echo 7", "ended with status 0: it printed nothing"),
        (f'exec {sys.executable} -I "$@"', "cannot import vllm: ModuleNotFoundError"),
    ],
)
def test_an_interpreter_that_cannot_run_vllm_is_broken_and_the_reason_is_named(
    tmp_path: Path, script: str, said: str
) -> None:
    (finding,) = vllm_findings([read_interpreter(interpreter_that(tmp_path, script), WORKERS)])
    assert finding.state == BROKEN and said in finding.what and "prefill_0" in finding.what
    assert "make vllm" in finding.remedy


def test_an_interpreter_that_is_not_there_is_broken(tmp_path: Path) -> None:
    (finding,) = vllm_findings([read_interpreter(str(tmp_path / "python"), WORKERS)])
    assert finding.state == BROKEN and "cannot be started: No such file" in finding.what


def test_an_interpreter_that_hangs_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_interpreter, "PROBE_S_MAX", 0.2)
    found = read_interpreter(interpreter_that(tmp_path, "exec sleep 60"), WORKERS)
    assert "did not import vLLM within" in found.problem


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0"])
def test_a_version_of_another_connector_api_is_broken(version: str) -> None:
    (finding,) = vllm_findings([VllmInterpreter("python", WORKERS, version)])
    assert finding.state == BROKEN and version in finding.what
    assert f"pip install 'vllm{VLLM_SUPPORTED}'" in finding.remedy


def test_packages_that_the_connector_lacks_are_named_with_their_installation(
    tmp_path: Path,
) -> None:
    (tmp_path / "xxhash.py").write_text("raise ImportError")
    (tmp_path / "zmq.py").write_text("raise ImportError")
    python = with_vllm(tmp_path, "__version__ = '0.32.0'")
    (finding,) = vllm_findings([read_interpreter(python, WORKERS)])
    assert finding.state == BROKEN and "lacks xxhash, pyzmq" in finding.what
    assert f"{python} -m pip install xxhash pyzmq" in finding.remedy


def imported_at_once(path: Path) -> Iterator[str]:
    """The modules that an import of the file imports: those outside of its functions."""
    waiting: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def packages_of(*modules: str) -> set[str]:
    """Top-level packages of others that these modules of ours import, and ours for them."""
    found, seen, waiting = set(), set(), list(modules)
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        top = module.partition(".")[0]
        if top not in OURS:
            found.add(top)
            continue
        path = ROOT / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                waiting += imported_at_once(file)
        waiting += [module.rpartition(".")[0]] if "." in module else []
    return found - set(sys.stdlib_module_names)


def test_the_needs_are_what_our_half_in_vllms_processes_imports() -> None:
    found = packages_of("backends.engine.vllm.process", "backends.engine.vllm.connector")
    assert found - {"vllm", "torch"} == set(NEEDS)
    assert all(find_spec(name) for name in NEEDS)
