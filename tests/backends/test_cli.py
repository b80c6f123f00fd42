"""The `mooncake` command is made of what each package registers."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from backends import cli
from backends.shipped import shipped_checkpoint
from backends.starter.command import lay_down


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def register(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    entries = {name: EntryPoint(name, value, cli.GROUP) for name, value in values.items()}
    monkeypatch.setattr(cli, "registered", lambda: entries)


def test_every_command_that_pyproject_registers_is_listed_and_can_be_loaded() -> None:
    status, output = run("--help")
    assert status == 0
    assert set(cli.registered()) >= set(cli.FIRST)
    for name, entry in cli.registered().items():
        assert name in output
        assert callable(entry.load()) or isinstance(entry.load(), typer.Typer)


def test_an_installation_from_before_a_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(monkeypatch, serve="backends.launcher.command:serve")
    status, output = run("replay", "--help")
    assert status == 2 and "make setup" in output
    assert run("serve", "--help")[0] == 0


def test_a_command_that_has_moved_since_the_installation_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(monkeypatch, replay="loadtest.no_such_module:replay", another="backends.cli:nothing")
    for name, module in (("replay", "loadtest.no_such_module"), ("another", "backends.cli")):
        status, output = run(name, "--help")
        assert status == 1 and module in output and "make setup" in output
    status, output = run("--help")
    assert status == 0 and "Cannot be loaded" in output, "one bad command must not hide the others"


def test_a_command_that_nobody_registered_is_refused() -> None:
    status, output = run("bogus")
    assert status == 2 and "No such command" in output


def test_a_command_of_somebody_else_is_listed_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    register(
        monkeypatch,
        another="tests.backends.test_cli:another",
        serve="backends.launcher.command:serve",
    )
    status, output = run("--help")
    assert status == 0 and output.index("serve") < output.index("another")
    assert run("another", "--number", "7") == (0, "7 it is")


def another(number: int = 1) -> None:
    """Say a number."""
    typer.echo(f"{number} it is")


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version") == (0, f"mooncake-triton {version('mooncake-triton')}")


def test_help_ends_with_examples_and_breaks_lines_only_where_the_terminal_ends() -> None:
    wide = CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    for name in cli.registered():
        result = wide.invoke(cli.app, [name, "--help"])
        assert result.exit_code == 0, name
        said = [line.strip() for line in result.output.splitlines()]
        behind = said[said.index("Examples:") + 1 :]
        assert [line for line in behind if line] == list(cli.EXAMPLES[name])
        command = cli.command_of(cli.registered()[name])
        for each in (command, *getattr(command, "commands", {}).values()):
            assert "\n" not in (each.help or "").replace("\n\n", ""), each.name


ASCII_LOCALE = {"LC_ALL": "C", "LANG": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def in_ascii_locale(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | ASCII_LOCALE,
        capture_output=True,
        timeout=60.0,
        check=False,
    )


@pytest.mark.slow
def test_a_command_reads_paths_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    repository = lay_down(tmp_path / "dépôt") and tmp_path / "dépôt"
    (repository / "demo_checkpoint").rename(tmp_path / "modèle")
    for path in repository.glob("*/config.pbtxt"):
        text = path.read_text("utf-8").replace("dépôt/demo_checkpoint", "modèle")
        path.write_text(text, "utf-8")
    assert "modèle" in (repository / "conductor" / "config.pbtxt").read_text("utf-8")
    found = in_ascii_locale(
        "-m", "backends.cli", "config", "check", "--model-repository", str(repository)
    )
    assert found.returncode == 0, found
    assert f"{repository} is right" in found.stdout.decode("utf-8")


IN_A_STUB = """
import sys
from backends.config_pbtxt import checkpoint_folder
from backends.text.tokenizer import Tokenizer
assert sys.getfilesystemencoding() == "ascii"
print(Tokenizer.load(checkpoint_folder("mod\\u00e8le", sys.argv[1])).vocabulary_tokens)
"""


def test_a_process_of_triton_reads_a_checkpoint_of_a_non_ascii_path(tmp_path: Path) -> None:
    # The Python in Triton's stub is ASCII in every locale; its parameters are UTF-8.
    shutil.copytree(shipped_checkpoint(), tmp_path / "modèle")
    found = in_ascii_locale("-X", "utf8=0", "-c", IN_A_STUB, str(tmp_path / "models"))
    assert found.returncode == 0, found
    assert int(found.stdout) > 1000
