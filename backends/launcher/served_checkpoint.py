"""The checkpoint that `mooncake serve` serves: a folder, or a name, whose model may be fetched.

Not here: fetching (models/fetching.py), checks of the checkpoint's content (model_settings/).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from backends.cluster.model_rendering import parameters_of
from backends.errors import ConfigError
from backends.model_settings.repository_files import read_texts
from backends.models import CHECKPOINTS_DIR, KNOWN, ModelError, Progress, checkpoint_of, fetch

DEMO, SHIPPED_DTYPE = "demo", "float32"  # in the shipped config.pbtxt files


def named_checkpoint(name: str, progress: Progress, root: Path = CHECKPOINTS_DIR) -> str:
    """The absolute folder of a name or path; "demo" and "" as they are.

    Fetches a known model that is not in `root`. Raises ConfigError if there is no such folder and
    no such name, ModelError if the model cannot be fetched.
    """
    if name in ("", DEMO):
        return name
    found = checkpoint_of(name, root)
    if found is None and name in KNOWN:
        found = fetch(name, root / name, progress)
    folder = found or Path(name).expanduser()
    if not folder.is_dir():
        known = ", ".join((DEMO, *KNOWN))
        raise ConfigError(
            f"--checkpoint {name}: there is no such folder, and no model of this name; give a "
            f"Hugging Face folder, {known}, or a name of `mooncake model list`"
        )
    return str(folder.resolve())


def default_checkpoint(
    name: str,
    repository: Path,
    progress: Progress,
    report: Callable[[str], None],
    root: Path = CHECKPOINTS_DIR,
) -> str:
    """`named_checkpoint` for a model that the user did not choose; "" if config.pbtxt decides.

    config.pbtxt decides if it names another checkpoint than the demo, or if the model cannot be
    had. `report` then receives one line.
    """
    try:
        texts = read_texts(repository).values()
        if any(parameters_of(text).get("checkpoint", DEMO) != DEMO for text in texts):
            return ""
        return named_checkpoint(name, progress, root)
    except (ModelError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        report(f"{name} is not available, so the demo model is served: {reason}")
        return ""


def dtype_of(checkpoint: str, repository: Path) -> str:
    """The dtype of a checkpoint whose config.json has bfloat16; "" for every other dtype.

    "" also if a config.pbtxt has another dtype than the shipped float32: its author chose it.
    """
    try:
        texts = read_texts(repository).values()
        if any(parameters_of(text).get("dtype", SHIPPED_DTYPE) != SHIPPED_DTYPE for text in texts):
            return ""
        config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
        dtype = config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError, ConfigError):
        return ""  # the checks of the repository report what is wrong
    return "bfloat16" if dtype == "bfloat16" else ""
