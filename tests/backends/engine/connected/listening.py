"""A listener that remembers what it heard, and lets a test wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 20.0


class Heard:
    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        self._note("claimed", request_id, local_tokens, loaded_tokens)

    def loaded(self, request_id: str) -> None:
        self._note("loaded", request_id)

    def saved(self, request_id: str, tokens: int) -> None:
        self._note("saved", request_id, tokens)

    def broken(self, reason: str) -> None:
        self._note("broken", reason)

    def wait_for(self, *wanted: Any) -> None:
        self.wait_until(lambda: wanted in self.all, f"{wanted}")

    def wait_until(self, is_true: Callable[[], bool], what: str = "it") -> None:
        with self._changed:
            assert self._changed.wait_for(is_true, WAIT_S), f"never heard {what}: {self.all}"

    def _note(self, *what: Any) -> None:
        with self._changed:
            self.all.append(what)
            self._changed.notify_all()
