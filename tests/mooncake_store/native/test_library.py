"""The compiled library: made once, shared, and never needed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.native import library

SHIPPED, KEPT = library.SOURCE, os.environ.get(library.CACHE, "")
# The real one takes ten seconds to compile.
SMALL = "void copy_blocks(void);\nvoid copy_blocks(void) {}\n"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="this host has no C compiler"
)


@pytest.fixture
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "native.c"
    path.write_text(SMALL)
    return path


@pytest.fixture(autouse=True)
def looked_at_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> Iterator[None]:
    monkeypatch.delenv(library.SWITCH, raising=False)  # all other tests may be run without
    monkeypatch.setenv(library.CACHE, str(tmp_path))
    monkeypatch.setattr(library, "SOURCE", source)
    library.forget()
    yield
    library.forget()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@needs_compiler
def test_it_is_compiled_once_and_kept_for_the_next_process(tmp_path: Path) -> None:
    assert library.library() is not None
    (name,) = files(tmp_path)
    made_ns = (tmp_path / name).stat().st_mtime_ns
    library.forget()
    assert library.library() is not None
    assert files(tmp_path) == [name] and (tmp_path / name).stat().st_mtime_ns == made_ns


@needs_compiler
def test_processes_that_start_together_all_have_it(source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mooncake_store.native import library\n"
        "library.SOURCE = Path(sys.argv[1]); assert library.library(), library.why_not()"
    )
    command = [sys.executable, "-c", code, str(source)]
    started = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4


@needs_compiler
def test_where_there_is_a_compiler_there_is_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of both paths would pass without a word when the C did not compile. The library is the
    one that the other tests use, so it is compiled once."""
    monkeypatch.setenv(library.CACHE, KEPT)
    monkeypatch.setattr(library, "SOURCE", SHIPPED)
    assert library.library() is not None, library.why_not()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "off")
    assert library.library() is None and library.function("copy_blocks", None, []) is None
    assert library.why_not() == "MOONCAKE_NATIVE=off selects Python"


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.COMPILER, "no-such-compiler")
    assert library.library() is None
    assert library.why_not().startswith("no C compiler: no-such-compiler is not on PATH")
    assert files(tmp_path) == []


@needs_compiler
def test_what_does_not_compile_is_named_and_leaves_nothing(tmp_path: Path, source: Path) -> None:
    source.write_text("int broken(void) { return undeclared; }\n")
    assert library.library() is None
    assert "could not compile native.c" in library.why_not() and "undeclared" in library.why_not()
    assert files(tmp_path) == []


def a_compiler(folder: Path, script: str) -> str:
    """A program that answers as this script does."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_a_compiler_that_prints_what_is_no_text_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broken = a_compiler(tmp_path_factory.mktemp("bin"), "printf 'error \\377\\376' >&2; exit 1")
    monkeypatch.setenv(library.COMPILER, broken)
    assert library.library() is None and "could not compile native.c" in library.why_not()


def test_a_compiler_that_takes_too_long_is_ended_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`cc` hands the work to `cc1`, which would go on for nobody."""
    folder = tmp_path_factory.mktemp("bin")
    os.mkfifo(folder / "alive")
    slow = a_compiler(folder, f"sleep 600 3<>{folder}/alive & wait")
    monkeypatch.setenv(library.COMPILER, slow)
    monkeypatch.setattr(library, "COMPILE_S_MAX", 2.0)
    assert library.library() is None and "took longer than 2 s" in library.why_not()
    alive = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert os.read(alive, 1) == b""  # nobody holds the other end: else it is BlockingIOError
    finally:
        os.close(alive)
    assert files(tmp_path) == []


@needs_compiler
def test_what_a_broken_compiler_made_is_made_anew_when_it_is_mended(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    monkeypatch.setenv(library.COMPILER, a_compiler(tmp_path_factory.mktemp("bin"), script))
    assert library.library() is None and library.why_not()
    monkeypatch.delenv(library.COMPILER)
    library.forget()
    assert library.library() is not None, library.why_not()


@needs_compiler
def test_a_compiler_may_be_named_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.COMPILER, "cc -pipe")
    assert library.library() is not None, library.why_not()


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    assert library.library() is not None
    (name,) = files(tmp_path)
    (tmp_path / name).chmod(0o777)
    library.forget()
    assert library.library() is None and "could be changed by others" in library.why_not()


@needs_compiler
def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert library.cache_folder() != tmp_path


@needs_compiler
def test_each_caller_declares_a_function_for_itself() -> None:
    one = library.function("copy_blocks", None, [ctypes.c_void_p])
    other = library.quick_function("copy_blocks", ctypes.c_int, [])
    assert one is not None and other is not None
    assert one.argtypes == [ctypes.c_void_p] and other.argtypes == []  # type: ignore[attr-defined]


def test_a_home_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(library.CACHE, "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(library.tempfile, "tempdir", None)  # type: ignore[attr-defined]
    assert library.cache_folder() == tmp_path / f"mooncake-{os.geteuid()}"
