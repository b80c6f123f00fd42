"""The Python environment of one client: made at its first use, with exact versions.

Never the project's own: aiperf and genai-perf want other versions of numpy and transformers than
the server does. What is installed is written into the environment, so that another version makes
it anew and an installation that was interrupted is not taken for a complete one.

Not here: which versions (aiperf.py, genai_perf.py), running them (process.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = PROJECT / ".venv-clients"
INSTALL_S_MAX = 900.0
LINES_SHOWN = 8


class ClientFailed(Exception):
    """A client could not be installed or did not do its work; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    install_s: float  # 0.0: it was there

    @property
    def bin(self) -> Path:
        return self.folder / "bin"


def environment(name: str, requirements: Sequence[str], parent: Path) -> Environment:
    """The environment `parent/name` with `requirements` in it; raises ClientFailed."""
    folder = parent.resolve() / name
    complete = folder / "installed.txt"
    wanted = "\n".join((sys.version.split()[0], *requirements))
    if complete.exists() and complete.read_text() == wanted:
        return Environment(folder, 0.0)
    started_s = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "install", "--quiet", *requirements],
    ):
        _run(command, requirements)
    complete.write_text(wanted)
    return Environment(folder, time.perf_counter() - started_s)


def _run(command: Sequence[str], requirements: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClientFailed(f"{' '.join(command)} took over {INSTALL_S_MAX:.0f} s") from None
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-LINES_SHOWN:])
        raise ClientFailed(
            f"cannot install {' '.join(requirements)}; it needs a package index (PyPI, or "
            f"PIP_INDEX_URL) and 1.3 GB of disk. {command[0]} said:\n{said}"
        )
