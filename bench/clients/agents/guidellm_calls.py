"""A synchronous run of the load generator guidellm: five chats of synthetic prompts.

Run as a program in its environment (call_matrix.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from bench.clients.call_matrix import CalledServer, run_calls

REQUESTS, OUTPUT_TOKENS = 5, 16


def synchronous(server: CalledServer) -> str:
    backend = f"kind=openai_http,target={server.url.removesuffix('/v1')},model={server.model}"
    report = Path("guidellm.json").resolve()
    options = {
        "backend": f"{backend},api_key={server.key}",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={server.checkpoint}",
        "data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    variables = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--disable-console-interactive"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1_000:]
    [benchmark] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS and totals["errored"] == 0, totals
    return f"{totals}"


CALLS = (synchronous,)

if __name__ == "__main__":
    run_calls(f"guidellm {version('guidellm')}", CALLS, ())
