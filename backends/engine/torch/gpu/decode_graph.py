"""Decode steps of a few padded shapes, recorded once and replayed: CUDA graphs.

A step of one token per work is hundreds of small kernels; started one by one, they take the CPU
longer than the GPU. So a step's inputs (token ids, positions, page tables) lie in tensors that stay
where they are, everything else is computed from these on the device, and what the device does is
recorded once per shape. A step then is one copy of the inputs and one replay.

A batch is padded to the next of BATCHES and its page tables to a power of two. What pads is the
work with the shortest context once more: it writes the numbers that this work itself writes into
the same place, so padding needs no page of its own and touches nobody's.

Without CUDA "recorded" is the same function called again (`CallAgain`): what is padded, planned and
read is then tested without a GPU. A recording that fails is told once, and from then on every step
takes the ragged way (step_plan.py), which is always there.

Not here: the layers (transformer.py), which requests share a step (batching/batching.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.torch.gpu.paged_plan import PagedKernels, PagedPlan
from backends.engine.torch.step_plan import QueryGroup, StepPlan, check_range
from backends.engine.torch.transformer import Transformer
from mooncake_store.layout import KvLayout, blocks_touched

log = logging.getLogger(__name__)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_TIMES = 2  # before recording: libraries choose kernels and take workspaces at a first call

Step = Callable[[], torch.Tensor]


class Recorder(Protocol):
    def record(self, step: Step) -> Step:
        """What does again on the device what `step` does now, reading the same tensors."""
        ...


class CallAgain:
    """The twin without CUDA."""

    def record(self, step: Step) -> Step:
        return step


class CudaRecorder:
    """One memory for the intermediate tensors of all graphs: only one of them runs at a time."""

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
        # thread_local: other threads copy pages meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"
        ):
            made = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return made

        return replay


def padded_inputs(
    batch: Sequence[Work], works: int, width: int, block_tokens: int
) -> NDArray[np.int64]:
    """Token ids [works], positions [works], then page tables [works, width], flat."""
    inputs = np.empty(works * (2 + width), dtype=np.int64)
    token_ids, positions = inputs[:works], inputs[works : 2 * works]
    tables = inputs[2 * works :].reshape(works, width)
    real = len(batch)
    token_ids[:real] = [work.token_ids[0] for work in batch]
    positions[:real] = [work.start for work in batch]
    for row, work in zip(tables, batch, strict=False):
        count = blocks_touched(work.end, block_tokens)
        row[:count] = work.pages[:count]
        row[count:] = work.pages[0]  # any page of its own: finite, and masked
    shortest = int(positions[:real].argmin())
    for each in (token_ids, positions, tables):
        each[real:] = each[shortest]
    return inputs


class StaticStep:
    """The inputs of one shape: so many works, of at most so many pages each."""

    def __init__(
        self,
        works: int,
        width: int,
        layout: KvLayout,
        device: torch.device,
        kernels: PagedKernels | None = None,  # None: the pages are gathered
    ) -> None:
        self.works, self.width = works, width
        self._layout = layout
        self._attend = None if kernels is None else kernels.static(works, width)
        # As `padded_inputs` lays them: one copy brings them all.
        self.inputs = torch.zeros(works * (2 + width), dtype=torch.int64, device=device)

    def bring(self, inputs: NDArray[np.int64]) -> None:
        """To the device, before what is recorded is replayed."""
        if self._attend is not None:
            tables = inputs[2 * self.works :].reshape(self.works, self.width)
            self._attend.refresh(tables, inputs[self.works : 2 * self.works] + 1)
        host = torch.from_numpy(inputs)
        self.inputs.copy_(host.pin_memory() if self.inputs.is_cuda else host, non_blocking=True)

    def plan(self) -> StepPlan:
        """Made of `inputs` where they lie, by kernels alone."""
        works, layout = self.works, self._layout
        token_ids, positions, flat = self.inputs.split([works, works, works * self.width])
        tables = flat.view(works, self.width)
        pages = tables.gather(1, (positions // layout.block_tokens)[:, None])
        first_rows = pages * (layout.layers * layout.rows * layout.block_tokens)
        first_rows += (positions % layout.block_tokens)[:, None]
        heads = torch.arange(layout.rows, device=self.inputs.device)
        paged, groups = None, []
        if self._attend is not None:
            attend = self._attend.over(tables, positions + 1)
            paged = PagedPlan(attend, None, attend)
        else:
            groups = [self._group(tables, positions, heads)]
        return StepPlan(
            tokens=works,
            token_ids=token_ids,
            positions=positions,
            token_rows=first_rows + heads * layout.block_tokens,
            decode_works=works,
            decodes=groups,
            prefills=[],
            query_tokens=groups,
            seen=None,
            last_rows=None,
            order=None,
            pages=[],
            fresh_pages=[],
            paged=paged,
        )

    def _group(
        self, tables: torch.Tensor, positions: torch.Tensor, heads: torch.Tensor
    ) -> QueryGroup:
        layout, context_tokens = self._layout, self.width * self._layout.block_tokens
        offsets = heads.view(layout.kv_factor, 1, layout.kv_heads, 1)
        rows = tables[None, :, None, :] * (layout.layers * layout.rows) + offsets
        return QueryGroup(0, self.works, rows.reshape(-1), context_tokens, positions + 1)


class DecodeGraphs:
    def __init__(self, transformer: Transformer, vocabulary_tokens: int, recorder: Recorder):
        self._transformer = transformer
        self._memory = transformer.attention.memory
        self._vocabulary_tokens = vocabulary_tokens
        self._recorder = recorder
        self._recorded: dict[tuple[int, int], tuple[StaticStep, Step]] = {}
        self._is_off = False

    def serves(self, batch: Sequence[Work]) -> bool:
        is_decode = all(len(work.token_ids) == 1 for work in batch)
        return is_decode and len(batch) <= BATCHES[-1] and not self._is_off

    @torch.inference_mode()
    def logits(self, batch: Sequence[Work]) -> torch.Tensor | None:
        """float32 [len(batch), vocabulary] on the device, until the next step; None: no graph."""
        block_tokens = self._memory.layout.block_tokens
        works = next(size for size in BATCHES if size >= len(batch))
        pages = max(blocks_touched(work.end, block_tokens) for work in batch)
        width = 1 << (pages - 1).bit_length()
        inputs = padded_inputs(batch, works, width, block_tokens)
        check_range("token id", inputs[:works], self._vocabulary_tokens)
        check_range("page", inputs[2 * works :], len(self._memory.pool))
        self._memory.clear_pages(self._entered(batch))
        try:
            known = self._recorded.get((works, width))
            static, step = known or (self._static(works, width), None)
            static.bring(inputs)
            return (step or self._record(static))()[: len(batch)]
        except Exception as error:  # edge: whatever a driver or a library says, the step goes on
            log.warning("decode steps run without CUDA graphs, which is slower: %s", error)
            self._is_off = True
            self._recorded.clear()
            return None

    def _static(self, works: int, width: int) -> StaticStep:
        memory, kernels = self._memory, self._transformer.attention.kernels
        return StaticStep(works, width, memory.layout, memory.pool.device, kernels)

    def _record(self, static: StaticStep) -> Step:
        def step() -> torch.Tensor:
            return self._transformer.forward(static.plan(), None).float()

        recorded = self._recorder.record(step)
        self._recorded[static.works, static.width] = static, recorded
        return recorded

    def _entered(self, batch: Sequence[Work]) -> list[int]:
        """Pages of which this step writes the first token: what is masked there must be finite."""
        block_tokens = self._memory.layout.block_tokens
        return [
            work.pages[work.start // block_tokens]
            for work in batch
            if work.start % block_tokens == 0
        ]
