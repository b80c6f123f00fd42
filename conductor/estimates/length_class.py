"""Classes of prompt length: who is compared with whom.

A prompt of 100k tokens costs fifty times one of 2k, so figures over all requests say little about
the long ones: they are few. Shares, margins and output lengths are therefore kept for each class.
The bounds are a factor of four apart, which keeps work within a class within about that factor.

Not here: what is done with a class (fair_share.py, margin.py, lengths.py).
"""

from __future__ import annotations

from bisect import bisect_right

BOUNDS_TOKENS = (4_096, 16_384, 65_536)  # a prompt of exactly a bound is in the longer class
CLASSES = len(BOUNDS_TOKENS) + 1


def length_class(prompt_tokens: int) -> int:
    """0 for the shortest prompts, CLASSES - 1 for the longest."""
    return bisect_right(BOUNDS_TOKENS, prompt_tokens)


def class_name(number: int) -> str:
    """Such as `4k-16k tokens`, for reasons that people read."""
    low, high = (0, *BOUNDS_TOKENS)[number], (*BOUNDS_TOKENS, 0)[number]
    if not low:
        return f"under {high // 1024}k tokens"
    return f"{low // 1024}k-{high // 1024}k tokens" if high else f"over {low // 1024}k tokens"
