"""The wheel has every file that the checkout serves with, and serves without the checkout.

It is built as `pip wheel .` does it, of what git knows, so that ignored files on this disk do not
count.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.shipped import shipped_repository
from loadtest.harness.server import free_addresses, models_waiting
from tests.e2e.server import wait_until

ROOT = Path(__file__).parents[1]
PACKAGES = ("backends", "conductor", "loadtest", "mooncake_store")
ONLY_IN_A_CLONE = ("bench", "tools")
# Of these packages only what is for readers of the source stays at home.
LEFT_OUT = (".md",)
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, because setuptools leaves a folder build/ that its next wheel draws from."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "out"))
    build = ("pyproject.toml", "README.md", "LICENSE", "backends/model_repository")
    for name in {*tracked(), *build}:
        if name.startswith((*PACKAGES, *ONLY_IN_A_CLONE, "model_repository")) or name in build:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name, follow_symlinks=False)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_each_file_of_the_packages_as_it_is(unpacked: Path) -> None:
    expected = {name for name in tracked() if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    expected = {name for name in expected if not name.endswith(LEFT_OUT)}
    missing = sorted(name for name in expected if not (unpacked / name).is_file())
    assert not missing, f"package-data in pyproject.toml leaves out {missing}"
    other = [
        name for name in expected if (unpacked / name).read_bytes() != (ROOT / name).read_bytes()
    ]
    assert not other


@pytest.mark.slow
def test_the_wheel_holds_no_benchmark_and_no_tool(unpacked: Path) -> None:
    assert all((ROOT / name / "__init__.py").is_file() for name in ONLY_IN_A_CLONE)
    assert not [name for name in ONLY_IN_A_CLONE if (unpacked / name).exists()]


def test_the_wheel_holds_the_model_repository_that_the_checkout_serves(unpacked: Path) -> None:
    held = unpacked / "backends" / "model_repository"
    served = shipped_repository()
    assert served == ROOT / "model_repository"
    names = {
        path.relative_to(served)
        for path in served.rglob("*")
        if path.is_file() and path.suffix != ".md"
    }
    tracked_names = {name for name in tracked() if name.startswith("model_repository/")}
    names = {name for name in names if f"model_repository/{name}" in tracked_names}
    assert names and {path.relative_to(held) for path in held.rglob("*") if path.is_file()} == names
    for name in names:
        assert (held / name).read_bytes() == (served / name).read_bytes()


def test_the_wheel_knows_the_commands_and_extras_of_pyproject(unpacked: Path) -> None:
    [folder] = unpacked.glob("*.dist-info")
    pyproject = (ROOT / "pyproject.toml").read_text()
    commands = pyproject.partition('[project.entry-points."mooncake.commands"]')[2]
    entries = (folder / "entry_points.txt").read_text()
    for line in commands.partition("\n\n")[0].split("\n")[1:]:
        assert line.replace('"', "") in entries, line
    metadata = (folder / "METADATA").read_text()
    for extra in ("bundled", "torch", "gateway", "tracing", "guided", "report", "locust"):
        assert f"Provides-Extra: {extra}" in metadata
    bare = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert bare and not [line for line in bare if "torch" in line or "nixl" in line]


@pytest.fixture
def installed(unpacked: Path, tmp_path: Path) -> Iterator[Path]:
    """The Python of an environment that has the wheel, and lent from this one all that it needs."""
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60
    )
    [packages] = environment.glob("lib/python*/site-packages")
    lent = [path for path in sys.path if path.endswith("site-packages")]
    # The folders of a .pth file are searched in its order: ours come before the lent ones, where
    # this checkout is installed.
    (packages / "a.pth").write_text("\n".join([str(unpacked), *lent]) + "\n")
    yield environment / "bin" / "python"


@pytest.mark.e2e
@pytest.mark.long
def test_a_wheel_lays_down_models_and_serves_them_where_no_checkout_is(
    installed: Path, unpacked: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()

    def mooncake(*arguments: str) -> subprocess.Popen[bytes]:
        with (home / f"{arguments[0]}.log").open("wb") as log:
            return subprocess.Popen(
                [installed, "-m", "backends.cli", *arguments],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )

    where = subprocess.run(
        [installed, "-c", "import backends; print(backends.__file__)"],
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert Path(where.stdout.strip()) == unpacked / "backends" / "__init__.py"
    assert mooncake("init", "my-models").wait(60) == 0
    addresses = free_addresses()
    ports = [
        argument
        for name in ("http", "grpc", "metrics")
        for argument in (f"--{name}-port", getattr(addresses, name).rpartition(":")[2])
    ]
    options = ("--model-repository", "my-models", "--store-bytes", "128M", *ports)
    server = mooncake("serve", *options)
    try:
        wait_until(
            lambda: server.poll() is not None or not models_waiting(addresses), "models", 120.0
        )
        assert server.poll() is None, (home / "serve.log").read_text()
        asked = subprocess.run(
            [
                "curl",
                "-s",
                f"http://{addresses.http}/v2/models/conductor/generate",
                "-d",
                '{"text_input": "It is a truth", "max_tokens": 8}',
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert '"finish_reason":"length"' in asked.stdout, asked.stdout
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0, (home / "serve.log").read_text()
    logs = home / ".mooncake" / f"logs-{addresses.http.rpartition(':')[2]}"
    assert "nixl" in (logs / "prefill_0.log").read_text()
    assert sorted(path.name for path in home.iterdir()) == [
        ".mooncake",
        "init.log",
        "my-models",
        "serve.log",
    ]
