"""The Python interpreter of an engine that has an environment of its own, and what it must have.

vLLM needs other versions of numpy and transformers than the server, so a worker starts vLLM in
another interpreter. `make vllm` makes its environment.

Not here: the process of vLLM (vllm/llm_thread.py), checks of an interpreter (backends/doctor).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from backends.config_pbtxt import path_beside

MADE_BY_MAKE = Path(".venv-vllm", "bin", "python")
VLLM_SUPPORTED = ">=0.32,<0.34"  # versions of vLLM whose connector API ours implements
# Module -> its package, of all modules that our half in vLLM's processes imports beside vLLM and
# torch. A test compares them with the imports.
NEEDS = {
    "msgspec": "msgspec",
    "numpy": "numpy",
    "psutil": "psutil",
    "xxhash": "xxhash",
    "zmq": "pyzmq",
}
FIND_VLLM = "from importlib.util import find_spec as find; assert find('vllm'), 'no vllm'"
FIND_S_MAX = 20.0  # timeout of a search that takes 0.1 s on a quiet machine
PROJECT = Path(__file__).parents[2]  # the checkout, or the folder in which the wheel is installed


def engine_interpreter(engine_python: str, repository: str | Path) -> Path:
    """The program that the parameter `engine_python` names; a relative path starts at the parent
    folder of `repository`. "" is the environment of `make vllm`, beside the model repository or in
    this checkout. Without such an environment, "" is the interpreter of this process."""
    if engine_python:
        return path_beside(engine_python, str(repository))
    for folder in (Path(repository).resolve().parent, PROJECT):
        if os.access(folder / MADE_BY_MAKE, os.X_OK):
            return folder / MADE_BY_MAKE  # unresolved, because the link decides the environment
    return Path(sys.executable)


def interpreter_problem(python: Path) -> str:
    """Why `python` cannot run vLLM, with the remedy; "" if it has vLLM. The search does not import
    the package, which would take seconds."""
    remedy = "`make vllm` makes an environment with vLLM; or set engine_python to one"
    try:
        command = [str(python), "-c", FIND_VLLM]
        found = subprocess.run(command, capture_output=True, timeout=FIND_S_MAX, check=False)
    except OSError as error:
        return f"engine_python {python} cannot be started ({error.strerror}); {remedy}"
    except subprocess.TimeoutExpired:
        return f"engine_python {python} did not answer within {FIND_S_MAX:.0f} s; {remedy}"
    return f"engine_python {python} has no vLLM; {remedy}" if found.returncode else ""
