"""What Triton says of the models in its repository, in words an operator can use.

Here: which models are expected, which are ready, and why one is not (Triton's reason without its
boilerplate). Not here: starting Triton (launch.py).
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelState:
    name: str
    is_ready: bool


class RepositoryWatch:
    """Polls Triton's repository index and reads refusals out of its log."""

    def __init__(self, repository: Path, http_url: str, log_path: Path) -> None:
        self._repository = repository
        self._index_url = f"{http_url}/v2/repository/index"
        self._log_path = log_path
        self._log_offset = 0
        self._refused: dict[str, str] = {}  # model -> why its newest edit was refused

    def expected(self) -> list[str]:
        return sorted(p.parent.name for p in self._repository.glob("*/config.pbtxt"))

    def states(self) -> list[ModelState]:
        """One state for each folder of the repository; empty while Triton does not answer."""
        request = urllib.request.Request(self._index_url, data=b"{}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=2.0) as answer:
                index = json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):
            return []
        ready = {entry["name"] for entry in index if entry.get("state") == "READY"}
        return [ModelState(name, name in ready) for name in self.expected()]

    def news(self) -> list[Load]:
        """Loads and refusals since the last call. Triton tries a refused model again at every
        poll; the same refusal is reported once, until the model has loaded or fails otherwise."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_offset)
                whole_lines = log.read().rpartition(b"\n")[0]
                self._log_offset += len(whole_lines)
        except OSError:
            return []
        found = []
        for load in loads(whole_lines.decode(errors="replace")):
            if load.reason and self._refused.get(load.model) == load.reason:
                continue
            self._refused.pop(load.model, None)
            if load.reason:
                self._refused[load.model] = load.reason
            found.append(load)
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """Triton loaded a model, or refused to."""

    model: str
    reason: str = ""  # why not; "" when it is loaded


LOAD = re.compile(
    r"successfully loaded '(?P<loaded>[^']+)'"
    r"|failed to load '(?P<refused>[^']+)' version \d+: (?P<reason>.*?)(?=\n[EWIF]\d{4} |\Z)",
    flags=re.DOTALL,
)


def loads(log_text: str) -> list[Load]:
    """What Triton's log says of loading models, in its order."""
    return [
        Load(match["loaded"]) if match["loaded"] else Load(
            match["refused"], tidy_reason(match["reason"]))
        for match in LOAD.finditer(log_text)
    ]  # fmt: skip


def tidy_reason(reason: str) -> str:
    """Drop the traceback and status words that Triton wraps around a model's own message."""
    reason = reason.strip().removesuffix('"').replace("\\n", "\n")  # the log escapes line ends
    reason = re.sub(r"^(Internal|Invalid argument|Unavailable): ", "", reason)
    reason = re.sub(r"\n\nAt:\n.*", "", reason, flags=re.DOTALL)
    return re.sub(r"^(\w+Error|TritonModelException|ConfigError): ", "", reason.strip())
