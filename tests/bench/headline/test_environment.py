"""When the environment of vLLM is made, and when only its additions are renewed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from backends.engine.interpreter import NEEDS
from bench.clients.environment import ClientFailed
from bench.headline import environment
from bench.headline.environment import ALIAS, STAMP, TESTING, vllm_environment


class Installer:
    """Records what is run instead of running it; `fails` is a word of a command that fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fails = folder, ""
        self.ran: list[str] = []
        monkeypatch.setattr(environment, "run", self.run)
        monkeypatch.setattr(environment, "install", self.install)
        monkeypatch.setattr(environment, "compile_sources", lambda _: self.ran.append("compile"))

    def run(self, command: Sequence[str]) -> None:
        if self.fails and self.fails in command:
            raise ClientFailed(f"cannot install {self.fails}")
        self.ran.append(" ".join(command))

    def install(self, folder: Path) -> None:
        self.ran.append("install vllm")
        (folder / "lib" / "python3.11" / "site-packages" / ALIAS).mkdir(parents=True)

    def environment(self) -> list[str]:
        """Make the environment; what was run for it."""
        self.ran.clear()
        assert vllm_environment(None, self.folder) == self.folder / "bin"
        return list(self.ran)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(tmp_path / "environment", monkeypatch)


def test_a_new_environment_has_the_needs_of_the_connector_and_of_tests_and_is_compiled_last(
    installer: Installer,
) -> None:
    venv, vllm, *additions, compiled = installer.environment()
    assert venv.startswith(f"{sys.executable} -m venv") and vllm == "install vllm"
    assert compiled == "compile"
    words = {word for command in additions for word in command.split()}
    assert {*NEEDS.values(), *TESTING} <= words
    assert f"-e {environment.PROJECT}" in additions[-1] and "--no-deps" in additions[-1]


def test_a_complete_environment_is_left_as_it_is(installer: Installer) -> None:
    installer.environment()
    assert installer.environment() == []


def test_a_changed_addition_renews_the_additions_and_not_vllm(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = installer.environment()
    monkeypatch.setattr(environment, "TESTING", (*TESTING, "another"))
    renewed = installer.environment()
    assert len(renewed) == len(made) - 2 and "another" in renewed[-3]
    assert renewed[-1] == "compile" and "install vllm" not in renewed
    assert installer.environment() == []


def test_an_environment_from_before_the_stamp_gets_the_additions_only(installer: Installer) -> None:
    installer.environment()
    (installer.folder / STAMP).unlink()
    assert "install vllm" not in installer.environment()
    assert (installer.folder / STAMP).exists()


@pytest.mark.parametrize("name", ["VLLM", "TORCH"])
def test_another_version_of_vllm_or_torch_makes_the_environment_anew(
    installer: Installer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installer.environment()
    (installer.folder / "old").touch()
    monkeypatch.setattr(environment, name, "9.9")
    assert installer.environment()[1] == "install vllm"
    assert not (installer.folder / "old").exists()


def test_additions_that_fail_leave_vllm_and_are_tried_again(installer: Installer) -> None:
    installer.fails = "xxhash"
    with pytest.raises(ClientFailed):
        installer.environment()
    assert not (installer.folder / STAMP).exists()
    installer.fails = ""
    assert "install vllm" not in installer.environment()


def test_half_an_installation_of_vllm_is_removed(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise ClientFailed("no index")

    monkeypatch.setattr(environment, "install", fail)
    with pytest.raises(ClientFailed):
        installer.environment()
    assert not installer.folder.exists()


@pytest.mark.slow
def test_a_file_for_a_newer_python_keeps_no_other_from_being_compiled(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "newer.py").write_text(
        "def f[T](a: T): ...\n" * (sys.version_info < (3, 12))
    )
    (tmp_path / "lib" / "fine.py").write_text("VALUE = 1\n")
    environment.compile_sources(tmp_path)
    assert list((tmp_path / "lib" / "__pycache__").glob("fine.*.pyc"))
