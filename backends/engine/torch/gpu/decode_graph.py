"""CUDA graphs of decode steps: a few padded shapes, each recorded once and replayed.

A decode step consists of hundreds of small kernels, and launching them one by one takes longer than
their execution. So the first step of each shape is recorded as a CUDA graph. The graph's inputs
(token ids, positions, page tables) are *static* tensors, with fixed addresses. The device
computes everything else from them. A later step of this shape is one copy and one replay.

A batch is padded to the next size in BATCHES, and the width of its page tables to a power of two.
The padding repeats the sequence with the shortest context. The repetitions write the same values to
the same rows as that sequence, so they need no page of their own.

Without CUDA, `Recorder` only calls the step again, so padding and plans are tested without a GPU.
After a failed recording or replay, every step uses the plan of step_plan.py, without padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.torch.gpu.paged_plan import PagedAttend, PagedKernels, PagedPlan
from backends.engine.torch.step_plan import QueryGroup, StepPlan, check_range, page_rows, token_rows
from backends.engine.torch.transformer import Transformer
from mooncake_store.layout import KvLayout, blocks_touched

log = logging.getLogger(__name__)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of sequences in recorded steps
WARM_TIMES = 2  # warm-up calls of a step before its recording (libraries allocate memory in them)

Step = Callable[[], torch.Tensor]


class Recorder:
    """For devices without CUDA graphs: calls the step again instead of a replay."""

    def record(self, step: Step) -> Step:
        """A function that repeats the device work of `step` on the same tensors."""
        return step


class CudaRecorder(Recorder):
    """Records CUDA graphs. Only one runs at a time, so all share memory of intermediate tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_TIMES):
                step()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        # With thread_local, other threads may copy pages during the recording.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"
        ):
            made = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return made

        return replay


def padded_inputs(
    batch: Sequence[Work], sequences: int, width: int, block_tokens: int
) -> NDArray[np.int64]:
    """One array: padded token ids [sequences], positions [sequences], tables [sequences, width]."""
    inputs = np.empty(sequences * (2 + width), dtype=np.int64)
    token_ids, positions = inputs[:sequences], inputs[sequences : 2 * sequences]
    tables = inputs[2 * sequences :].reshape(sequences, width)
    real = len(batch)
    token_ids[:real] = [sequence.token_ids[0] for sequence in batch]
    positions[:real] = [sequence.start for sequence in batch]
    for row, sequence in zip(tables, batch, strict=False):
        count = blocks_touched(sequence.end, block_tokens)
        row[:count] = sequence.pages[:count]
        row[count:] = sequence.pages[0]  # any page with finite values, because it is masked
    shortest = int(positions[:real].argmin())
    for each in (token_ids, positions, tables):
        each[real:] = each[shortest]
    return inputs


class StaticStep:
    """A decode step of one shape: `sequences` sequences of at most `width` pages each."""

    def __init__(
        self,
        sequences: int,
        width: int,
        layout: KvLayout,
        device: torch.device,
        kernels: PagedKernels | None = None,  # None: the pages are gathered
    ) -> None:
        self.sequences, self.width = sequences, width
        self.step: Step | None = None  # replays the recorded step; None: not recorded yet
        self._layout = layout
        self._attend = None if kernels is None else kernels.static(sequences, width)
        # One tensor for the whole result of `padded_inputs`, so that one copy is enough.
        self.inputs = torch.zeros(sequences * (2 + width), dtype=torch.int64, device=device)

    def bring(self, inputs: NDArray[np.int64]) -> None:
        """Copy the result of `padded_inputs` to the device, before each replay."""
        if self._attend is not None:
            tables = inputs[2 * self.sequences :].reshape(self.sequences, self.width)
            self._attend.refresh(tables, inputs[self.sequences : 2 * self.sequences] + 1)
        host = torch.from_numpy(inputs)
        self.inputs.copy_(host.pin_memory() if self.inputs.is_cuda else host, non_blocking=True)

    def plan(self) -> StepPlan:
        """The step's plan. Each replay computes the plan's tensors from the static inputs."""
        sequences, layout = self.sequences, self._layout
        token_ids, positions, flat = self.inputs.split(
            [sequences, sequences, sequences * self.width]
        )
        tables = flat.view(sequences, self.width)
        pages = tables.gather(1, (positions // layout.block_tokens)[:, None]).squeeze(1)
        heads = torch.arange(layout.rows, device=self.inputs.device)
        paged, groups = None, []
        if self._attend is not None:
            attend = PagedAttend(self._attend.over(tables, positions + 1), None)
            paged = PagedPlan(attend, None, attend)
        else:
            rows, tokens = page_rows(tables, heads, layout), self.width * layout.block_tokens
            groups = [QueryGroup(0, sequences, rows, tokens, positions + 1)]
        return StepPlan(
            tokens=sequences,
            token_ids=token_ids,
            positions=positions,
            token_rows=token_rows(pages, positions, heads, layout),
            decode_sequences=sequences,
            decodes=groups,
            query_tokens=groups,
            paged=paged,
        )


class DecodeGraphs:
    def __init__(self, transformer: Transformer, recorder: Recorder) -> None:
        self._transformer = transformer
        self._memory = transformer.attention.memory
        self._recorder = recorder
        self._recorded: dict[tuple[int, int], StaticStep] = {}  # (sequences, width) -> step
        self._is_off = False

    def serves(self, batch: Sequence[Work]) -> bool:
        is_decode = all(len(each.token_ids) == 1 and each.scores is None for each in batch)
        return is_decode and len(batch) <= BATCHES[-1] and not self._is_off

    @torch.inference_mode()
    def logits(self, batch: Sequence[Work]) -> torch.Tensor | None:
        """float32 logits [len(batch), vocabulary], kept until the next step. None on failure."""
        block_tokens = self._memory.layout.block_tokens
        sequences = next(size for size in BATCHES if size >= len(batch))
        pages = max(blocks_touched(sequence.end, block_tokens) for sequence in batch)
        width = 1 << (pages - 1).bit_length()
        inputs = padded_inputs(batch, sequences, width, block_tokens)
        tables = inputs[2 * sequences :]
        check_range("token id", inputs[:sequences], self._transformer.config.vocabulary_tokens)
        check_range("page", tables, len(self._memory.pool))
        self._memory.arrive(tables)
        self._memory.clear_pages(self._entered(batch))
        try:
            static = self._static(sequences, width)
            static.bring(inputs)
            if static.step is None:
                static.step = self._recorder.record(
                    lambda: self._transformer.forward(static.plan(), None).float()
                )
            return static.step()[: len(batch)]
        except Exception as error:  # Catch all: the caller can compute the step without a graph
            log.warning("decode steps run without CUDA graphs, which is slower: %s", error)
            self._is_off = True
            self._recorded.clear()
            return None

    def _static(self, sequences: int, width: int) -> StaticStep:
        if (static := self._recorded.get((sequences, width))) is None:
            memory, kernels = self._memory, self._transformer.attention.kernels
            static = StaticStep(sequences, width, memory.layout, memory.pool.device, kernels)
            self._recorded[sequences, width] = static
        return static

    def _entered(self, batch: Sequence[Work]) -> list[int]:
        """Pages that this step begins. The caller clears them, so that masked rows are finite."""
        block_tokens = self._memory.layout.block_tokens
        return [
            sequence.pages[sequence.start // block_tokens]
            for sequence in batch
            if sequence.start % block_tokens == 0
        ]
