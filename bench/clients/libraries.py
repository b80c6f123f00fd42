"""Libraries for OpenAI's interface: all calls of each, in an environment of its own.

Each environment has exactly these packages, whatever the project's own has. LiteLLM is the newest
whose requirements the package index had; it needs `openai` 2.

Not here: the calls (openai_calls.py, litellm_calls.py), installing (environment.py).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from bench.clients.call_matrix import VARIABLE, CalledServer
from bench.clients.environment import ClientFailed, run_client
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import SOURCE


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    requirements: tuple[str, ...]
    calls: str  # module


OPENAI = "bench.clients.openai_calls"
LIBRARIES = {
    each.name: each
    for each in (
        Library("openai-3", ("openai==3.54.0",), OPENAI),
        Library("openai-2", ("openai==2.54.0",), OPENAI),
        Library("litellm", ("litellm==1.106.2",), "bench.clients.litellm_calls"),
    )
}


@dataclass(frozen=True, slots=True)
class CallOutcome:
    call: str
    came: str
    failure: str  # "": it succeeded
    left_out: str  # why it was not made; "": it was

    @property
    def shown(self) -> str:
        return self.failure or self.came or f"left out: {self.left_out}"


@dataclass(frozen=True, slots=True)
class LibraryRun:
    client: str  # with its version
    outcomes: tuple[CallOutcome, ...]

    @property
    def failed(self) -> list[CallOutcome]:
        return [each for each in self.outcomes if each.failure]

    def row(self) -> dict[str, Cell]:
        left_out = sum(bool(each.left_out) for each in self.outcomes)
        calls = len(self.outcomes) - left_out
        return {
            "client": self.client,
            "calls": calls,
            "failed": len(self.failed),
            "left_out": left_out,
        }

    def target(self) -> Target:
        why = "; ".join(each.call for each in self.failed)
        return Target(f"{self.client} failed_calls", float(len(self.failed)), "<=", 0.0, why)


def run(library: Library, binaries: Path, server: CalledServer, folder: Path) -> LibraryRun:
    """Run the calls with output in `folder`; ClientFailed when they do not get to their end."""
    folder.mkdir(parents=True)
    variables = {VARIABLE: json.dumps(dataclasses.asdict(server)), "PYTHONPATH": str(SOURCE)}
    command = [str(binaries / "python"), "-m", library.calls]
    return read_run(run_client(command, folder, variables))


def read_run(said: str) -> LibraryRun:
    """Libraries may print lines of their own in between."""
    client, outcomes = "", []
    for line in said.splitlines():
        if line.startswith('{"client": '):
            client = json.loads(line)["client"]
        elif line.startswith('{"call": '):
            outcomes.append(CallOutcome(**json.loads(line)))
    if not client or not outcomes:
        raise ClientFailed(f"the client made no call; its output: {said[-500:]}")
    return LibraryRun(client, tuple(outcomes))
