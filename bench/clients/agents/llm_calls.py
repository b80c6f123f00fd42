"""The command `llm`: a prompt, a tool of its own (`-T`), an object by `--schema`.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from bench.clients.agents.weather import QUESTION
from bench.clients.call_matrix import CalledServer, run_calls


def llm(server: CalledServer, *words: str) -> str:
    folder = Path("llm").resolve()
    folder.mkdir(exist_ok=True)
    model = {
        "model_id": "served",
        "model_name": server.model,
        "api_base": server.url,
        "api_key_name": "served",
        "supports_tools": True,
        "supports_schema": True,
    }
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    program = str(Path(sys.executable).parent / "llm")
    command = [program, "-m", "served", "--key", server.key, "-o", "max_tokens", "60", *words]
    variables = os.environ | {"LLM_USER_PATH": str(folder)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1_000:]
    assert done.stdout.strip(), "no text"
    return done.stdout.strip()


def prompt(server: CalledServer) -> str:
    """It streams by default."""
    whole = llm(server, "--no-stream", "-o", "seed", "5", QUESTION)
    assert llm(server, "-o", "seed", "5", QUESTION) == whole
    return repr(whole)


def a_tool(server: CalledServer) -> str:
    """The command cannot require a call: a weak model may answer without one."""
    return repr(llm(server, "-T", "llm_version", "What is the version of llm?"))


def schema(server: CalledServer) -> str:
    found = json.loads(llm(server, "--schema", "city, days int", QUESTION))
    assert set(found) == {"city", "days"} and isinstance(found["days"], int)
    return repr(found)


CALLS = (prompt, a_tool, schema)

if __name__ == "__main__":
    run_calls(f"llm {version('llm')}", CALLS, ())
