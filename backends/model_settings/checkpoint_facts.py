"""Reads facts of a checkpoint: from its config.json, tokenizer and headers of weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from backends.config_pbtxt import checkpoint_folder
from backends.engine.checkpoint import Checkpoint
from backends.engine.model_config import read_model_config, read_or_problems
from backends.errors import ConfigError
from backends.model_settings.repository_check import CheckpointFacts, LookUp
from backends.text.tokenizer import Tokenizer


def facts_beside(repository: Path) -> LookUp:
    """A cached function: value of a parameter `checkpoint` -> facts. A relative path starts at the
    parent folder of the repository."""

    @cache
    def look_up(checkpoint: str) -> CheckpointFacts:
        try:
            return _facts(checkpoint_folder(checkpoint, str(repository)))
        except (ConfigError, RuntimeError) as error:  # RuntimeError: an unknown user in ~user
            return CheckpointFacts((str(error).removeprefix(f"checkpoint {checkpoint} "),))

    return look_up


def _facts(folder: Path) -> CheckpointFacts:
    config, of_torch = read_or_problems(read_model_config, folder)
    _, found = read_or_problems(Checkpoint.open, folder)
    try:
        Tokenizer.load(folder)
    except ConfigError as error:
        found.append(str(error))
    if config is None:
        return CheckpointFacts(tuple(found), tuple(of_torch))
    return CheckpointFacts(tuple(found), (), config.context_tokens_max, config.layers)
