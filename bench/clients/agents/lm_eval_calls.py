"""The evaluation tool lm-eval on 200 sums of the repository: as generated text, as likelihoods.

Run as a program in its environment (call_matrix.py). lm-eval encodes prompts with the tokenizer of
the served checkpoint and sends lists of token ids.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from bench.clients.call_matrix import CalledServer, run_calls

TASKS = Path(__file__).parent / "lm_eval_tasks"
ITEMS = 200
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": "hf", "TQDM_DISABLE": "1"}


def evaluated(server: CalledServer, task: str, metric: str, batch: int) -> str:
    folder = Path(task).resolve()
    shutil.copytree(TASKS, folder)
    arguments = {
        "base_url": f"{server.url}/completions",
        "model": server.model,
        "tokenizer": server.checkpoint,
        "num_concurrent": 1,
        "max_retries": 1,
        "max_length": 2_048,
    }
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    program = Path(sys.executable).parent / "lm_eval"
    command = [str(program), "--model", "local-completions", "--model_args", given]
    command += ["--tasks", task, "--include_path", ".", "--batch_size", str(batch)]
    command += ["--output_path", "out"]
    variables = os.environ | OFFLINE | {"OPENAI_API_KEY": server.key}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-1_500:]}"
    [found] = folder.glob("out/**/results_*.json")
    results = json.loads(found.read_text())
    assert results["n-samples"][task]["effective"] == ITEMS
    return f"{ITEMS} items, {metric} {results['results'][task][metric]:.3f}"


def generation(server: CalledServer) -> str:
    return evaluated(server, "sums_text", "exact_match,stripped", batch=1)


def loglikelihood(server: CalledServer) -> str:
    """`echo` with `logprobs`; a request has several prompts."""
    return evaluated(server, "sums_choice", "acc,none", batch=8)


CALLS = (generation, loglikelihood)

if __name__ == "__main__":
    run_calls(f"lm-eval {version('lm-eval')}", CALLS, ())
