"""One request inside an engine: its tokens, its pages, how far it is, why it ended.

Only the state. Not here: which request computes next (batching.py), drawing a token (sampling.py),
stop words, which are matched on text by the decode worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class TokenSequence:
    """Tokens are prompt then output; those before `computed_tokens` have their KV in `pages`."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # "stop" (an end id, which is the last output), "length", or not yet

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def is_decoding(self) -> bool:
        """The next step computes one token, the newest one."""
        return bool(self.output_ids) and self.computed_tokens == self.tokens - 1

    def work(self, tokens_max: int) -> Work:
        """The next tokens to compute, at most so many."""
        start, prompt_tokens = self.computed_tokens, len(self.prompt_ids)
        end = min(self.tokens, start + tokens_max)
        assert start < end, f"{self.request_id} has nothing to compute: {start} of {self.tokens}"
        if start >= prompt_tokens:
            token_ids = self.output_ids[start - prompt_tokens : end - prompt_tokens]
        else:
            token_ids = list(self.prompt_ids[start:end])
            token_ids += self.output_ids[: max(0, end - prompt_tokens)]
        return Work(token_ids, start, self.pages)

    def computed(self, tokens: int) -> None:
        """The KV of so many more tokens is in the pages."""
        self.computed_tokens += tokens
        assert self.computed_tokens <= self.tokens, (self.computed_tokens, self.tokens)

    def append(self, token_id: int) -> None:
        """A new output token; it may be the last one."""
        assert not self.is_finished, f"{self.request_id} ended with {self.finish_reason}"
        self.output_ids.append(token_id)
        if token_id in self.params.end_ids and len(self.output_ids) > self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.params.max_tokens:
            self.finish_reason = "length"
