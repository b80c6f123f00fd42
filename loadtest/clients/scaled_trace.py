"""A published trace at another scale, in its own format, for clients that cannot scale.

Lengths and times are those of `mooncake replay --length-scale X --speed Y`, by the same function.
Hash ids stay: a client is told that each stands for `block_tokens` tokens. Not here: reading
(trace.py), lengths (workloads.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadtest.replay.prompts import scaled_lengths
from loadtest.replay.trace import TraceRow


def write_scaled(rows: Sequence[TraceRow], length_scale: float, speed: float, path: Path) -> int:
    """Writes `path`; returns the tokens that a hash id stands for."""
    assert rows and speed > 0, "an empty trace or no speed"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            lengths = scaled_lengths(row, length_scale)
            line = {
                "timestamp": round((row.timestamp_ms - rows[0].timestamp_ms) / speed),
                "input_length": lengths.prompt_tokens,
                "output_length": lengths.output_tokens,
                "hash_ids": list(row.hash_ids),
            }
            file.write(json.dumps(line) + "\n")
    return scaled_lengths(rows[0], length_scale).block_tokens
