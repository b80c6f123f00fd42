"""What a user sends through: one request in, its events as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from loadtest.client.protocol import GenerateRequest, TokenEvent


class Sender(Protocol):
    """Shared by all users of a process."""

    def send(self, request: GenerateRequest, timeout_s: float) -> Iterator[TokenEvent]:
        """Raises ServerError. Closing the iterator early cancels the request."""
        ...

    def close(self) -> None: ...
