"""A process of the store that has said `ready`, for as long as a stack lives.

Not here: which processes a benchmark needs (its own site), Triton (server.py).
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path


def ready_process(
    stack: ExitStack, module: str, *arguments: str, log: Path | None = None
) -> subprocess.Popen[str]:
    """`python -m mooncake_store.MODULE`; ends with the stack. Without `log` it writes to stderr.

    RuntimeError when it ends instead of getting ready, with its last words if they are in `log`.
    """
    command = [sys.executable, "-m", f"mooncake_store.{module}", *arguments]
    errors = stack.enter_context(log.open("a")) if log else None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    stack.enter_context(process)
    stack.callback(process.terminate)
    assert process.stdout is not None
    if not process.stdout.readline().startswith("ready"):
        process.wait()
        reason = log.read_text()[-2_000:] if log else "its reason is above"
        raise RuntimeError(f"{module} did not start: {reason}")
    return process
