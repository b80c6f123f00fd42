"""NVIDIA Dynamo's index in a process of its own, with the Python that has its wheel.

Not here: the measuring itself (peer_client.py, which nothing of this project is imported into).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from loadtest.bench.index.lookups import COMPARED, IDS, Measured, Pass
from loadtest.bench.index.placement import Load

SCRIPT = Path(__file__).with_name("peer_client.py")


class Peer:
    """A RadixTree with the trace in it; RuntimeError, with its last words, when it does not run."""

    def __init__(self, python: Path, load: Load) -> None:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            load.save(self._folder / "load.json")
            log = stack.enter_context((self._folder / "log").open("w"))
            self._process = subprocess.Popen(
                [str(python), str(SCRIPT), str(self._folder / "load.json"), str(COMPARED)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "DYN_LOG": "error"},
            )  # fmt: skip
            stack.enter_context(self._process)
            stack.callback(self._process.kill)
            first = self._answer()
            self.version = str(first["version"])
            self.hashing: dict[str, float] = first["hashing"]
            self.rss_bytes = int(first["rss_bytes"])
            self.measured = Measured("dynamo", IDS, load.blocks / float(first["store_s"]))
            self.answers: list[dict[int, int]] = [dict(pairs) for pairs in first["answers"]]
            self._stack = stack.pop_all()

    def round(self) -> None:
        found = self._ask("round")
        self.measured.passes.append(Pass(**found))

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stack.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        words = (self._folder / "log").read_text()[-1_000:]
        raise RuntimeError(f"Dynamo's index does not run here: {words}")
