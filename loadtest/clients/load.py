"""What a client is asked to send, and what it reports of it.

Not here: how it is told (aiperf.py, genai_perf.py), what the server says (server_ttft.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.client.server import Addresses


@dataclass(frozen=True, slots=True)
class Load:
    """The same for every client: fresh prompts, some requests at a time, answers of one length."""

    addresses: Addresses
    tokenizer: Path  # a Hugging Face folder; the clients count tokens with it
    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """A client's own figures of one run."""

    client: str
    model: str
    workload: str
    requests: int
    ttft_ms_mean: float
    ttft_ms_p50: float
    table: str  # as the client printed it
