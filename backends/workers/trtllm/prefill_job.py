"""One prompt at a prefill worker on TensorRT-LLM: what has been heard of it, from whom.

Its engine says its token and that it has ended, the connector what it need not compute and which
KV is in the pages; these come from two threads, in any order.

Not here: what follows of it (backends/workers/trtllm/prefill_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from backends.engine.trtllm.llm_thread import Running
from backends.workers.prefill_job import PrefillJob
from backends.workers.protocol import PrefillReply


@dataclass(slots=True)
class TrtllmPrefillJob(PrefillJob):
    running: Running | None = None
    is_staged: bool = False
    is_told: bool = False  # the first token is on its way ahead of the reply, if it may go ahead
    is_answered: bool = False
    started_tokens: int = 0  # cached ones when the engine got it
    token_id: int | None = None
    unsaved: range = range(0)  # blocks that are not wholly in their pages yet
    whole_tokens: int = 0  # of the prompt, in whole pages of the engine: all that is saved
    given_s: float = 0.0  # to the engine
    ended_s: float = 0.0  # by the engine
    is_claimed: bool = False  # the connector recognised it
    is_unmatched: bool = False  # it did not, and the engine has computed it all the same
    native: bytes | None = None  # None: the engine has not ended it yet

    @property
    def is_known(self) -> bool:
        """What of it was cached: the connector's word may come a little after the engine's."""
        return self.is_claimed or self.is_unmatched

    def reply(self, incarnation: str, block_bytes: int) -> PrefillReply:
        reply = PrefillJob.reply(self, incarnation, block_bytes)
        if not self.native and not self.is_unmatched:
            return reply
        return msgspec.structs.replace(reply, native=self.native or b"", blocks=[])
