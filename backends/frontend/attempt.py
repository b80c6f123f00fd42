"""One attempt at a request, and what it brings: records only.

Not here: running it (generation.py), whether there is another one (attempts.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from backends.text.text_stream import Emission


@dataclass(slots=True)
class Message:
    """One message for the client: what is new, and what is known at this point."""

    emission: Emission
    output_tokens: int  # generated ones in this message
    finish_reason: str = ""
    cached_tokens: int = 0
    decision: dict[str, object] | None = None


@dataclass(slots=True)
class Try:
    """One attempt at the rest of a request, by one pair of workers."""

    request_id: str  # its own: what a lost worker still does must not touch the next try
    context_ids: list[int] = field(default_factory=list)  # the last tokens before its first one
    worker_id: str = ""  # who is at it now
    incarnation: str = ""  # which life of it: the routed one, until the worker itself tells
    called_s: float = 0.0  # when it was asked
    begin_lock: threading.Lock = field(default_factory=threading.Lock)
    is_begun: bool = False  # its first token was emitted, or that failed with `problem`
    begun_at_s: float = 0.0
    problem: Exception | None = None


class Superseded(Exception):
    """Another thread runs this request on; this one must not touch it any more."""
