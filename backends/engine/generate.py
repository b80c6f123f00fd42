"""Many prompts through one engine in one process: continuous batching without a server.

For tests, the machine profile and benchmarks. A step computes chunks of prompts and one token of
each running request together. Not here: workers, which hand over KV between engines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching import DecodeBatching, Progress, next_chunks
from backends.engine.interface import Engine, Work
from backends.engine.sampling import sample
from backends.engine.sampling_params import SamplingParams
from backends.engine.sequence import TokenSequence

Prompt = Sequence[int]


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    chunk_tokens: int = 512,
    slots_max: int = 16,
) -> list[list[int]]:
    """The output tokens of each prompt. Each is what the prompt alone would get."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, token_id in generate_tokens(engine, prompts, params, chunk_tokens, slots_max):
        outputs[index].append(token_id)
    return outputs


def generate_tokens(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    chunk_tokens: int = 512,
    slots_max: int = 16,
) -> Generator[tuple[int, int], None, None]:
    """(index of the prompt, token) as they come. Leaving early gives the pages back."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    sequences = {
        str(index): TokenSequence(str(index), prompt, own)
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    }
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
            assert running, "pages are taken by somebody else: nothing can start"
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
    for sequence, work, row in zip(taking_part, batch, logits, strict=True):
        sequence.computed(len(work.token_ids))
        if sequence.computed_tokens == sequence.tokens:
            yield int(sequence.request_id), _append_sample(sequence, row)


def _append_sample(sequence: TokenSequence, logits: NDArray[np.float32]) -> int:
    position = len(sequence.output_ids)
    token_id = sample(logits, sequence.params, position, sequence.prompt_ids, sequence.output_ids)
    sequence.append(token_id)
    return token_id
