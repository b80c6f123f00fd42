"""Whether an interpreter can run vLLM and our half in its processes, found out by running it.

Not here: which interpreter a worker uses and what it must have (engine/interpreter.py), findings
(judgement.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from backends.engine.interpreter import NEEDS, engine_interpreter
from backends.model_settings.model_file import ModelFile

PROBE_S_MAX = 120.0  # timeout of the probe; without compiled sources vLLM's import takes 20 s
WORDS_SHOWN = 300  # characters of an error message
PROBE = """
import importlib, json, sys
found = {"version": "", "missing": [], "problem": ""}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        found["missing"].append(name)
try:
    found["version"] = importlib.import_module("vllm").__version__
except Exception as error:
    found["problem"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class VllmInterpreter:
    """An interpreter of workers with the engine vllm."""

    python: str
    workers: tuple[str, ...]
    version: str = ""  # of vLLM; "": vLLM cannot be imported
    missing: tuple[str, ...] = ()  # packages of NEEDS that it lacks
    problem: str = ""  # why vLLM cannot be imported; "": it can


def read_interpreters(files: Iterable[ModelFile], repository: Path) -> list[VllmInterpreter]:
    """Run each interpreter of the workers in `files` that have the engine vllm, once."""
    workers = defaultdict(list)
    for file in files:
        if file.value("engine") == "vllm":
            python = engine_interpreter(file.value("engine_python"), repository)
            workers[str(python)].append(file.model)
    return [read_interpreter(python, tuple(models)) for python, models in workers.items()]


def read_interpreter(python: str, workers: tuple[str, ...]) -> VllmInterpreter:
    try:
        ran = subprocess.run(
            [python, "-c", PROBE, *NEEDS],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S_MAX,
            check=False,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
        )
    except OSError as error:
        return VllmInterpreter(python, workers, problem=f"cannot be started: {error.strerror}")
    except subprocess.TimeoutExpired:
        what = f"did not import vLLM within {PROBE_S_MAX:.0f} s"
        return VllmInterpreter(python, workers, problem=what)
    for found in _objects(ran.stdout):
        missing = tuple(NEEDS[name] for name in found["missing"])
        problem = f"cannot import vllm: {found['problem']}"[:WORDS_SHOWN]
        problem = problem if found["problem"] else ""
        return VllmInterpreter(python, workers, found["version"], missing, problem)
    words = ran.stderr.strip()[-WORDS_SHOWN:] or "it printed nothing"
    what = f"ended with status {ran.returncode}: {words}"
    return VllmInterpreter(python, workers, problem=what)


def _objects(output: str) -> Iterator[dict[str, object]]:
    """The JSON objects among the lines of `output`, the last first; vLLM may print, too."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found
