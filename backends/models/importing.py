"""Imports a GGUF file of the user as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from backends.models.placing import WAITS, WHOLE, placed, sha256_of
from backends.models.problems import ModelError
from backends.models.progress import Progress

README = """\
# {name}

`mooncake model import` made this folder from the file `{file}` (SHA-256 {sha256}).
License according to that file: {license}.

Changes: the weights were rounded to bfloat16, after decoding if they were quantised. The tokenizer
and the chat template come from the same file.
"""


def import_gguf(path: Path, to: Path, progress: Progress) -> bool:
    """Make a checkpoint from a GGUF file in the folder `to`. False: `to` has it already.

    An interrupted or failed call leaves no new folder. Raises ModelError with all problems.
    """
    from backends.models.conversion import Convertible  # late: the package gguf takes 0.3 s

    convertible = Convertible.open(path)
    try:
        sha256 = sha256_of(path)
    except OSError as error:
        raise ModelError(str(path), [f"cannot be read: {error.strerror or error}"]) from None
    source = {"name": to.name, "file": path.name, "sha256": sha256}
    with placed(to, source, convertible.size_bytes, lambda: progress(WAITS, 0.0)) as partial:
        if partial is None:
            return False
        convertible.write(partial / WHOLE, progress)
        text = README.format(
            name=convertible.file.metadata.get("general.name", to.name),
            file=path.name,
            sha256=sha256,
            license=convertible.file.metadata.get("general.license", "not stated"),
        )
        (partial / WHOLE / "README.md").write_text(text, encoding="utf-8")
    return True
