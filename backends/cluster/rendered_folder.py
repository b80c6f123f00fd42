"""The rendered model repository of a host, and the manifest of its rendered files.

The manifest has the digest of each config.pbtxt as it was rendered. A file with another digest was
edited by the operator. `mooncake serve` keeps an edited file, and only `mooncake cluster render
models` overwrites it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan
from backends.cluster.model_rendering import (
    BYTES,
    CONFIG,
    parameters_of,
    rendered_models,
    templates_in,
)

MANIFEST = "manifest.json"


def is_rendered(repository: Path) -> bool:
    """Whether the repository was rendered for one host, which may not have both roles."""
    return (repository.resolve().parent / MANIFEST).exists()


@dataclass(frozen=True, slots=True)
class Difference:
    """How a model on disk differs from the rendering of the current cluster file."""

    model: str
    kind: str  # edited | outdated | removed | added | missing
    changes: tuple[str, ...] = ()  # text for each parameter: "threads: 2, in the cluster file 1"

    def __str__(self) -> str:
        remedy = {
            "edited": "edited by hand; the edit is kept until the model is rendered again",
            "outdated": "outdated; the next start or rendering updates it",
            "removed": "removed by hand; the next start or rendering writes it again",
            "added": "added by hand; it is kept",
            "missing": "not rendered yet; the next start or rendering writes it",
        }[self.kind]
        changes = f" ({'; '.join(self.changes)})" if self.changes else ""
        return f"{self.model}: {remedy}{changes}"


class RenderedFolder:
    """The rendered models of one host. `base`: the repository of templates. Raises TemplateMissing
    if `base` lacks a template."""

    def __init__(self, deployment: Deployment, plan: HostPlan, base: Path) -> None:
        self.repository = Path(plan.folder) / plan.model_repository
        self._manifest_path = self.repository.parent / MANIFEST
        self._deployment = deployment
        self._host = plan.host
        self._models = rendered_models(deployment, plan, templates_in(base))

    def write(self, keeps_edits: bool) -> list[str]:
        """Write and remove models. Return the written ones. With `keeps_edits`, edited models are
        neither written nor removed."""
        before = self._manifest()
        written = []
        self.repository.mkdir(parents=True, exist_ok=True)
        for model in before.keys() - self._models.keys():
            is_edited = _digest(self._on_disk(model)) != before[model]
            if not (keeps_edits and is_edited):
                shutil.rmtree(self.repository / model, ignore_errors=True)
        for model, text in self._models.items():
            now = self._on_disk(model)
            is_edited = now is not None and _digest(now) != before.get(model)
            if now == text or (is_edited and keeps_edits):
                continue
            self._write_model(model, text)
            written.append(model)
        self._write_manifest()
        return written

    def differences(self) -> list[Difference]:
        rendered = self._manifest()
        found = []
        for model, text in sorted(self._models.items()):
            now = self._on_disk(model)
            if now is None:
                kind = "removed" if model in rendered else "missing"
                found.append(Difference(model, kind))
            elif now != text:
                kind = "outdated" if _digest(now) == rendered.get(model) else "edited"
                found.append(Difference(model, kind, _changes(text, now)))
        folders = {path.parent.name for path in self.repository.glob(f"*/{CONFIG}")}
        found += [Difference(model, "added") for model in sorted(folders - self._models.keys())]
        return found

    def _write_model(self, model: str, text: str) -> None:
        """Write config.pbtxt last, because Triton loads a model once its folder has this file."""
        folder = self.repository / model
        (folder / "1").mkdir(parents=True, exist_ok=True)
        partial = self.repository.parent / f".{model}.{CONFIG}"
        partial.write_text(text, encoding="utf-8", errors=BYTES)
        partial.replace(folder / CONFIG)

    def _on_disk(self, model: str) -> str | None:
        try:
            return (self.repository / model / CONFIG).read_text("utf-8", BYTES)
        except OSError:
            return None

    def _manifest(self) -> dict[str, str]:
        """Model -> digest of its rendered text; {} without a readable manifest."""
        try:
            found = json.loads(self._manifest_path.read_text())["models"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            str(model): str(digest)
            for model, digest in found.items()
            if "/" not in str(model) and not str(model).startswith(".")
        }

    def _write_manifest(self) -> None:
        manifest = {
            "deployment": self._deployment.name,
            "host": self._host,
            "models": {model: _digest(text) for model, text in sorted(self._models.items())},
        }
        partial = self._manifest_path.with_suffix(".partial")
        partial.write_text(json.dumps(manifest, indent=2) + "\n")
        partial.replace(self._manifest_path)


def _digest(text: str | None) -> str:
    return "" if text is None else hashlib.sha256(text.encode("utf-8", BYTES)).hexdigest()


def _changes(rendered: str, now: str) -> tuple[str, ...]:
    ours: Mapping[str, str] = parameters_of(rendered)
    theirs = parameters_of(now)
    names = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    return tuple(
        f"{name}: {theirs.get(name, 'missing')}, in the cluster file {ours.get(name, 'missing')}"
        for name in names
    )
