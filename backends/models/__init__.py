"""Checkpoints that can be fetched by name or imported from a GGUF file."""

from backends.models.catalogue import CHECKPOINTS_DIR, KNOWN, ModelError, checkpoint_of, is_fetched
from backends.models.fetching import fetch
from backends.models.progress import Progress, no_progress, shown_progress

__all__ = [
    "CHECKPOINTS_DIR",
    "KNOWN",
    "ModelError",
    "Progress",
    "checkpoint_of",
    "fetch",
    "is_fetched",
    "no_progress",
    "shown_progress",
]
