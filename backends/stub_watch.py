"""Notices that the process of a model died. Triton does not: it reports the model as ready.

Each model instance runs in a process of its own (Triton's Python stub), a child of tritonserver.
Not here: starting it again (mirror.py).
"""

from __future__ import annotations

from pathlib import Path

import psutil

STUB = "triton_python_backend_stub"


class StubWatch:
    def __init__(self, triton_pid: int) -> None:
        self._triton = psutil.Process(triton_pid)
        self._seen: set[str] = set()

    def died(self, expected: set[str]) -> list[str]:
        """Models of `expected` that had a process and have none now; each is named once."""
        alive = set(self._models_alive())
        lost = sorted((self._seen & expected) - alive)
        self._seen = alive
        return lost

    def _models_alive(self) -> list[str]:
        models = []
        for process in self._triton.children():
            try:
                arguments = process.cmdline()  # raises for a zombie
            except psutil.Error:
                continue
            if len(arguments) > 1 and Path(arguments[0]).name == STUB:
                models.append(Path(arguments[1]).parents[1].name)
        return models
