"""Who installed the package without an extra reads which one is missing, in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip's own copy
    from pip._vendor import tomli as tomllib

from backends import cli, extras
from backends.engine.interpreter import VLLM_SUPPORTED

ROOT = Path(__file__).parents[2]
# Extras for building and testing, and one that brings the same modules as another.
WITHOUT_MODULES = {"test", "train", "nixl-cu12"}
# Extras that `test` does not draw: two are other engines, and `torch` and images bring the others.
OF_OTHERS = {"bundled", "nixl", "trtllm", "vllm"}

# Runs `mooncake ARGUMENTS` as if nothing of the extras were installed.
BARE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HIDDEN = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Hidden())
from backends.cli import main
main(sys.argv[1:])
"""


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def names(requirements: list[str]) -> set[str]:
    """Of distributions, as an index normalises them."""
    found = {re.split(r"[\[<>=!~; ]", line)[0] for line in requirements}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


def top_level(extra: str) -> set[str]:
    return {module.partition(".")[0] for module in extras.MODULES[extra]}


def bare(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    hidden = set().union(*map(top_level, extras.MODULES))
    return subprocess.run(
        [sys.executable, "-c", BARE, ",".join(hidden), *arguments],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_extras_of_pyproject_are_those_that_code_knows() -> None:
    assert set(project()["optional-dependencies"]) - WITHOUT_MODULES == set(extras.MODULES)


@pytest.mark.parametrize("extra", sorted(extras.MODULES))
def test_an_extra_brings_the_modules_that_it_is_named_for(extra: str) -> None:
    found = packages_distributions()
    listed = names(project()["optional-dependencies"][extra])
    for module in top_level(extra):
        if module not in found:
            pytest.skip(f"{module} is not installed here")
        brought = {re.sub(r"[-_.]+", "-", name).lower() for name in found[module]}
        assert brought & listed, f"{module} is of {brought}, the extra has {listed}"
        assert not brought & names(project()["dependencies"])


def test_the_extra_for_tests_draws_all_that_they_import() -> None:
    [ours] = [
        line
        for line in project()["optional-dependencies"]["test"]
        if line.startswith(extras.PACKAGE)
    ]
    drawn = set(ours.partition("[")[2].rstrip("]").split(","))
    assert drawn >= set(extras.MODULES) - OF_OTHERS


def test_the_extra_for_vllm_asks_for_the_versions_that_the_engine_supports() -> None:
    assert project()["optional-dependencies"]["vllm"] == [f"vllm{VLLM_SUPPORTED}"]


@pytest.mark.slow
def test_without_any_extra_every_command_can_be_asked_what_it_does() -> None:
    listed = bare("--help")
    assert listed.returncode == 0, listed.stderr
    for name in cli.FIRST:
        assert re.search(rf"^\W+{name}\s", listed.stdout, re.MULTILINE), name
    assert "pip install" not in listed.stdout, "no command lacks an extra before it runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("report a.html --out b.html", "report"),
        ("simulate --plot a.png", "report"),
        ("plan --trace t --slo-ttft 1 --slo-tbt 1", "report"),
        ("replay t --report b.html", "report"),
    ],
)
def test_a_command_without_its_extra_says_so_in_one_line_before_it_begins(
    arguments: str, extra: str, tmp_path: Path
) -> None:
    ran = bare(*arguments.split(), cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1 and extras.install_line(extra) in ran.stderr, ran.stderr
    assert not list(tmp_path.iterdir())


def test_the_load_test_without_locust_says_so_before_it_starts_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loadtest.users.__main__ import main

    monkeypatch.setattr(extras, "_is_there", lambda module: module != "locust")
    with pytest.raises(SystemExit, match=r"needs locust.*\[locust\]"):
        main([])


def test_an_error_of_no_extra_is_nobody_s() -> None:
    assert extras.explained(ModuleNotFoundError("no", name="torch.nn")).endswith("[torch]'")
    assert extras.explained(ModuleNotFoundError("no", name="backends.nothing")) == ""
    assert extras.explained(ImportError("cannot import name")) == ""
    extras.require("report", "a picture")
    assert not extras._is_there("no_such_package.part")


def test_a_command_that_lacks_an_extra_at_once_is_listed_and_says_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from importlib.metadata import EntryPoint

    entries = {"serve": EntryPoint("serve", "backends.launcher.command:serve", cli.GROUP)}
    monkeypatch.setattr(cli, "registered", lambda: entries)

    def lacks(_: object) -> None:
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    monkeypatch.setattr(cli, "command_of", lacks)
    for arguments in (["serve", "--help"], ["serve", "anything", "--at", "all"]):
        with pytest.raises(SystemExit, match=r"^`mooncake serve` needs fastapi.*\[gateway\]'$"):
            cli.main(arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code in (0, None)
    assert "Needs fastapi" in capfd.readouterr().out
