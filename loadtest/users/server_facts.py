"""What users must know of the server, and how text relates to tokens there. Pure.

Users send text, the server counts tokens. How many bytes make a token is measured once with a
sample of the same kind of text; what a later prompt needs is then an estimate, held to be up to
`ESTIMATE_SLACK` times too low. What the server itself counted needs no estimate.

Not here: asking (probe.py).
"""

from __future__ import annotations

import math

import msgspec

ESTIMATE_SLACK = 1.2


class ServerFacts(msgspec.Struct, frozen=True):
    """A master asks for them and tells its workers."""

    block_tokens: int
    context_tokens_max: int
    vocabulary_tokens: int
    special_token_ids: tuple[int, ...]
    bytes_per_token: float

    def characters(self, tokens: int) -> int:
        """How long a text of about this many tokens is; our texts are ASCII."""
        return max(1, round(tokens * self.bytes_per_token))

    def tokens(self, text: str) -> int:
        """About how many tokens a text has."""
        return math.ceil(len(text.encode()) / self.bytes_per_token)

    def fits(self, counted_tokens: int, text: str, max_tokens: int) -> bool:
        """Whether a prompt of so many counted tokens and `text` leaves room for the answer."""
        prompt_tokens = counted_tokens + math.ceil(self.tokens(text) * ESTIMATE_SLACK)
        return prompt_tokens + max_tokens <= self.context_tokens_max
