"""Which interpreter an engine with an environment of its own gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backends.engine import interpreter
from backends.engine.interpreter import MADE_BY_MAKE, engine_interpreter, interpreter_problem


def made_in(folder: Path) -> Path:
    python = folder / MADE_BY_MAKE
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    monkeypatch.setattr(interpreter, "PROJECT", folder)
    return folder


def test_a_named_interpreter_starts_beside_the_repository_and_is_used_even_if_another_is_made(
    tmp_path: Path, checkout: Path
) -> None:
    made_in(tmp_path)
    repository = tmp_path / "models"
    assert engine_interpreter("env/bin/python", repository) == tmp_path / "env" / "bin" / "python"
    assert engine_interpreter("/opt/python", str(repository)) == Path("/opt/python")


def test_without_a_name_the_environment_beside_the_repository_is_before_that_of_the_checkout(
    tmp_path: Path, checkout: Path
) -> None:
    repository = tmp_path / "site" / "models"
    assert engine_interpreter("", repository) == Path(sys.executable)
    of_checkout = made_in(checkout)
    assert engine_interpreter("", repository) == of_checkout
    beside = made_in(tmp_path / "site")
    assert engine_interpreter("", repository) == beside


def test_an_environment_whose_interpreter_cannot_run_is_not_used(
    tmp_path: Path, checkout: Path
) -> None:
    python = made_in(tmp_path)
    python.unlink()
    python.symlink_to(tmp_path / "removed")
    assert engine_interpreter("", tmp_path / "models") == Path(sys.executable)


def test_an_interpreter_has_no_problem_only_if_it_has_vllm(tmp_path: Path) -> None:
    assert "has no vLLM; `make vllm`" in interpreter_problem(isolated(tmp_path, "without"))
    (tmp_path / "vllm.py").write_text("raise AssertionError('it is not imported')")
    assert interpreter_problem(isolated(tmp_path, "with", f"PYTHONPATH={tmp_path}")) == ""


def test_an_interpreter_that_is_no_program_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    for name, reason in (("python", "Permission denied"), ("nowhere", "No such file")):
        found = interpreter_problem(tmp_path / name)
        assert str(tmp_path / name) in found and reason in found and "make vllm" in found


def isolated(folder: Path, name: str, variables: str = "") -> Path:
    path = folder / name
    path.write_text(f'#!/bin/sh\ncd /\n{variables} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path
