"""Many prompts through one engine in one process: continuous batching without a server.

For tests, the machine profile and benchmarks. A step computes chunks of prompts and one token of
each running request together.

Not here: workers, which hand over KV between engines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching.batching import DecodeBatching, Progress, next_chunks
from backends.engine.interface import Engine, Work
from backends.engine.sampling import Guide, draw, largest_rows
from backends.engine.sampling_params import SamplingParams

Prompt = Sequence[int]


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    chunk_tokens: int = 512,
    slots_max: int = 16,
    guides: Sequence[Guide | None] = (),
) -> list[list[int]]:
    """The output tokens of each prompt, equal to those of the prompt alone. `guides`: one for each
    prompt, or none."""
    outputs: list[list[int]] = [[] for _ in prompts]
    tokens = generate_tokens(engine, prompts, params, chunk_tokens, slots_max, guides)
    for index, token_id in tokens:
        outputs[index].append(token_id)
    return outputs


def generate_tokens(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    chunk_tokens: int = 512,
    slots_max: int = 16,
    guides: Sequence[Guide | None] = (),
) -> Generator[tuple[int, int], None, None]:
    """Yields (index of the prompt, token) in order of generation. Closing it early returns the
    pages."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    sequences = {
        str(index): TokenSequence(str(index), prompt, own)
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    }
    for index, guide in enumerate(guides):
        sequences[str(index)].guide = guide
    batching = DecodeBatching(
        engine.pages, engine.layout.block_tokens, slots_max, max(1, len(prompts))
    )
    for request_id, sequence in sequences.items():
        batching.add(request_id, len(sequence.prompt_ids), sequence.params.max_tokens)
    running: list[TokenSequence] = []
    try:
        while running or batching.waiting:
            for admitted in batching.admit():
                sequences[admitted.request_id].pages = admitted.pages
                running.append(sequences[admitted.request_id])
            assert running, "another user holds the pages: no prompt can start"
            yield from _step(engine, running, chunk_tokens)
            for sequence in [sequence for sequence in running if sequence.is_finished]:
                running.remove(sequence)
                engine.pages.release(batching.remove(sequence.request_id))
    finally:
        for sequence in running:
            engine.pages.release(batching.remove(sequence.request_id))


def _step(
    engine: Engine, running: list[TokenSequence], chunk_tokens: int
) -> Iterator[tuple[int, int]]:
    """One forward for chunks and decodes, then a token for each request that is due one."""
    prompts = [
        Progress(sequence.request_id, len(sequence.prompt_ids), sequence.computed_tokens)
        for sequence in running
        if not sequence.is_decoding
    ]
    chunks = {
        chunk.request_id: chunk
        for chunk in next_chunks(prompts, chunk_tokens, engine.layout.block_tokens)
    }
    taking_part: list[TokenSequence] = []
    batch: list[Work] = []
    for sequence in running:
        chunk = chunks.get(sequence.request_id)
        if sequence.is_decoding or chunk is not None:
            taking_part.append(sequence)
            batch.append(sequence.work(chunk.tokens if chunk else 1))
    logits = engine.forward(batch)
    asked = [(each.params, len(each.output_ids), each.guide) for each in taking_part]
    largest = largest_rows(logits, asked)
    for row, (sequence, work) in enumerate(zip(taking_part, batch, strict=True)):
        sequence.computed(len(work.token_ids))
        if sequence.computed_tokens == sequence.tokens:
            token_id = _drawn(sequence, logits[row]) if largest is None else largest[row]
            sequence.append(token_id)
            yield int(sequence.request_id), token_id


def _drawn(sequence: TokenSequence, logits: NDArray[np.float32]) -> int:
    position = len(sequence.output_ids)
    drawn = draw(
        logits, sequence.params, position, sequence.prompt_ids, sequence.output_ids, sequence.guide
    )
    return drawn.token_id


@dataclass(slots=True)
class TokenSequence:
    """Tokens are prompt then output; those before `computed_tokens` have their KV in `pages`."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    # "stop" (an end id, which is the last output), "length", or "" while it runs
    finish_reason: str = ""
    guide: Guide | None = None

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
        """The next tokens to compute, at most `tokens_max`."""
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
        """The KV of that many more tokens is in the pages."""
        self.computed_tokens += tokens
        assert self.computed_tokens <= self.tokens, (self.computed_tokens, self.tokens)

    def append(self, token_id: int) -> None:
        """Append a new output token; it may be the last one."""
        assert not self.is_finished, f"{self.request_id} ended with {self.finish_reason}"
        self.output_ids.append(token_id)
        if token_id in self.params.end_ids and len(self.output_ids) > self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.params.max_tokens:
            self.finish_reason = "length"
