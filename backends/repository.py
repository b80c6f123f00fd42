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
    reason: str = ""  # why the newest attempt to load failed; "" while none has


class RepositoryWatch:
    """Polls Triton's repository index and reads refusals out of its log."""

    def __init__(self, repository: Path, http_url: str, log_path: Path) -> None:
        self._repository = repository
        self._index_url = f"{http_url}/v2/repository/index"
        self._log_path = log_path
        self._log_offset = 0

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
        newest = {entry["name"]: entry for entry in index}
        states = []
        for name in self.expected():
            entry = newest.get(name, {})
            is_failed = entry.get("state") == "UNAVAILABLE"
            reason = tidy_reason(entry.get("reason", "")) if is_failed else ""
            states.append(ModelState(name, entry.get("state") == "READY", reason))
        return states

    def new_refusals(self) -> list[str]:
        """Configuration refusals that appeared in the log since the last call."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_offset)
                text = log.read().decode(errors="replace")
                self._log_offset = log.tell()
        except OSError:
            return []
        return refusals(text)


def refusals(log_text: str) -> list[str]:
    """The messages of models that failed to load, as they stand in Triton's log."""
    pattern = r"failed to load \'([^\']+)\' version \d+: (.*?)(?=\n[EWIF]\d{4} |\Z)"
    found = re.findall(pattern, log_text, flags=re.DOTALL)
    return [f"{name}: {tidy_reason(text)}" for name, text in found]


def tidy_reason(reason: str) -> str:
    """Drop the traceback and status words that Triton wraps around a model's own message."""
    reason = re.sub(r"^(Internal|Invalid argument|Unavailable): ", "", reason.strip())
    reason = re.sub(r"\n\nAt:\n.*", "", reason, flags=re.DOTALL)
    return re.sub(r"^(\w+Error|TritonModelException|ConfigError): ", "", reason.strip())
