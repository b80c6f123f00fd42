"""Libraries, agent frameworks and tools for OpenAI's interface, each in an environment
of its own, with all calls of it.

Each environment has exactly these packages, whatever the project's own has. LiteLLM is the newest
whose requirements the package index had; it needs `openai` 2.

Not here: the calls (openai_calls.py, litellm_calls.py, agents/), installing (environment.py).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.clients.call_matrix import VARIABLE, CalledServer
from bench.clients.environment import (
    ClientEnvironment,
    ClientFailed,
    environment,
    npm_environment,
    run_client,
)
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import SOURCE


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    requirements: tuple[str, ...]
    calls: str  # module; of npm packages, the script in agents/
    gates: bool = True  # False: its failed calls are reported and are no failure of the run

    @property
    def is_npm(self) -> bool:
        return self.calls.endswith(".mjs")

    def installed(self, parent: Path) -> ClientEnvironment:
        make = npm_environment if self.is_npm else environment
        return make(self.name, self.requirements, parent)


AGENTS_FOLDER = Path(__file__).parent / "agents"
RUN_S_MAX = 900.0  # 200 items of lm-eval on two busy cores
OPENAI = "bench.clients.openai_calls"
LIBRARIES = {
    each.name: each
    for each in (
        Library("openai-3", ("openai==3.54.0",), OPENAI),
        Library("openai-2", ("openai==2.54.0",), OPENAI),
        Library("litellm", ("litellm==1.106.2",), "bench.clients.litellm_calls"),
    )
}


def agent(name: str, *requirements: str, gates: bool = True) -> Library:
    module = f"bench.clients.agents.{name.replace('-', '_')}_calls"
    return Library(name, requirements, module, gates)


AGENTS = {
    each.name: each
    for each in (
        Library("npm-openai", ("openai@6.49.0",), "openai_calls.mjs"),
        Library(
            "npm-ai",
            (
                "ai@6.0.326",
                "@ai-sdk/openai-compatible@2.0.92",
                "@ai-sdk/openai@3.0.141",
                "zod@4.6.7",
            ),
            "ai_calls.mjs",
        ),
        agent("langchain", "langchain-openai==1.7.4", "langchain==1.5.2"),
        agent("pydantic-ai", "pydantic-ai-slim[openai]==2.68.0"),
        agent("instructor", "instructor==1.17.0"),
        agent("openai-agents", "openai-agents==0.24.0"),
        agent("litellm-proxy", "litellm[proxy]==1.106.2"),
        agent("anthropic", "anthropic==2.14.0"),
        agent("lm-eval", "lm-eval[api]==0.4.13", "transformers==5.23.0"),
        agent(
            "llama-index",
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-core==0.14.25",
            gates=False,
        ),
        agent("smolagents", "smolagents[openai]==1.26.0", gates=False),
        agent("haystack", "haystack-ai==3.4.1", gates=False),
        agent("semantic-kernel", "semantic-kernel==1.45.0", gates=False),
        agent("autogen", "autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5", gates=False),
        agent("llm", "llm==0.36", gates=False),
        Library("promptfoo", ("promptfoo@0.121.20",), "promptfoo_calls.mjs", gates=False),
        agent("guidellm", "guidellm==0.8.1", gates=False),
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
    gates: bool = True

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
            "gates": self.gates,
        }

    def target(self) -> Target:
        why = "; ".join(each.call for each in self.failed)
        return Target(f"{self.client} failed_calls", float(len(self.failed)), "<=", 0.0, why)


def run(library: Library, binaries: Path, server: CalledServer, folder: Path) -> LibraryRun:
    """Run the calls with output in `folder`; ClientFailed when they do not get to their end."""
    folder.mkdir(parents=True)
    variables = {VARIABLE: json.dumps(dataclasses.asdict(server)), "PYTHONPATH": str(SOURCE)}
    command = [str(binaries / "python"), "-m", library.calls]
    if library.is_npm:
        for script in AGENTS_FOLDER.glob("*.mjs"):  # node finds packages beside the script alone
            shutil.copy(script, binaries.parent)
        command = ["node", str(binaries.parent / library.calls)]
    return read_run(run_client(command, folder, variables, RUN_S_MAX), library.gates)


def read_run(said: str, gates: bool = True) -> LibraryRun:
    """Libraries may print lines of their own in between."""
    client, outcomes = "", []
    for line in said.splitlines():
        if line.startswith('{"client": '):
            client = json.loads(line)["client"]
        elif line.startswith('{"call": '):
            outcomes.append(CallOutcome(**json.loads(line)))
    if not client or not outcomes:
        raise ClientFailed(f"the client made no call; its output: {said[-500:]}")
    return LibraryRun(client, tuple(outcomes), gates)
