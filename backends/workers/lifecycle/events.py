"""Events of a job's life at a worker, and the actions that follow from them: records only.

Threads post events: the engine's thread, loaders, the writer, the inbox, and the threads of an
engine with a process of its own. Not here: which event leads to which action (prefill.py,
decode.py), carrying out actions (workers/worker.py and its two roles).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

# --- events of both roles


class PagesGiven(NamedTuple):
    """The job has pages."""


class KvLoaded(NamedTuple):
    """A loader has read the job's KV from the store."""

    releases: bool = False  # True: the leases of a decode job's handed-over blocks may end


class LoadFailed(NamedTuple):
    """A thread failed to load the job's KV, to compile its grammar, or to start it."""

    error: Exception
    releases: bool = False  # as in KvLoaded


class GrammarReady(NamedTuple):
    """The job's grammar is compiled."""


class EngineReady(NamedTuple):
    """The driver has prepared the engine for the job."""


class JobStopped(NamedTuple):
    """The frontend no longer wants the job."""


class JobFailed(NamedTuple):
    error: Exception


class BetweenSteps(NamedTuple):
    """No step is being computed. Follows ASK_TURN; if that was asked twice before, then once."""

    is_reading: bool = False  # True: the loader reads an announced layer into the job's pages


class EngineLeft(NamedTuple):
    """The engine neither reads nor writes the job's pages and slots, and queues no more writes."""

    is_certain: bool = True  # False: it may do so later; the driver keeps the pages


class Written(NamedTuple):
    """The writer has carried out all tasks that were queued before. Follows each AWAIT_WRITES."""


class CallLate(NamedTuple):
    """The call of a failed or stopped job has waited long enough for copies of its KV to end."""


# --- events of a prefill job


class Blocked(NamedTuple):
    """Another prompt of this worker produces the next block that the job lacks."""


class Unblocked(NamedTuple):
    """Some of the awaited blocks were stored or abandoned."""


class LayerDue(NamedTuple):
    """A layer-wise job needs the next layer of its cached prefix."""


class LayerRead(NamedTuple):
    """A loader has tried to read the layer."""

    is_here: bool  # False: a block of the layer is missing in the store


class Sampled(NamedTuple):
    token_id: int  # the first token of the output


class Answerable(NamedTuple):
    """The engine has handed KV over by itself. Its KV still goes to the store."""


class Computed(NamedTuple):
    """The engine has computed the prompt, and has queued the last write of its KV."""


# --- events of a decode job


class EngineRead(NamedTuple):
    """The engine has copied the handed-over KV, which was read in slots of the local node."""


class Decoded(NamedTuple):
    """New tokens are to be sent, or the last token was decoded."""

    tokens: int  # decoded by this worker so far
    is_last: bool


class Preempted(NamedTuple):
    """A job of higher priority needs the pages or the slot."""


class KvSaved(NamedTuple):
    """The writer has stored the KV of a preempted job."""

    blocks: Sequence[Any]  # the BlockRef of each block, to be loaded later


class SaveFailed(NamedTuple):
    error: Exception


class Do(Enum):
    """Actions. A worker has one method for each, named like the action."""

    ASK_TURN = "post BetweenSteps as soon as no step is computed"
    LOAD = "let a loader read the job's KV"
    COMPILE = "let a thread compile the grammar"
    START = "let the driver prepare the engine, which may take long"
    JOIN = "let the job take part in steps"
    REMOVE = "take the job out of the worker's tables and of the batch"
    STOP_ENGINE = "let the driver stop the job; EngineLeft follows"
    AWAIT_WRITES = "post Written behind the writer's queued tasks"
    RELEASE_PAGES = "return the pages to the pool"
    RELEASE_LEASES = "release the leases of the job's blocks"
    FAIL = "end the call with the job's error, or as cancelled"
    REPLY = "end the call with the result"
    # of a prefill job
    READ_LAYER = "let a loader read the next layer of the prefix"
    LAYER_LOADED = "tell the batching that the layer is in the ring buffers"
    STOP_BATCH = "take the job out of steps; it keeps its pages"
    GIVE_UP_SLOTS = "queue the release of the slots that were written so far"
    SEND_FIRST = "send the first token ahead of the reply"
    END_WRITES = "drop the writes of the job that are still queued"
    KEEP_LEASES = "leave the leases to the decode worker"
    FREE_SLOTS = "free the slots that were never filled"
    SETTLE = "let others produce the blocks that the job has not stored"
    # of a decode job
    RELEASE_GIVEN = "release the leases of the handed-over blocks"
    SEND = "send the new tokens"
    TAKE_PAGES = "take the pages from a preempted job, and lease its blocks"
    SAVE = "let the writer store the job's KV; KvSaved or SaveFailed follows"
    SAVE_OVER = "release the pages that a preempted job had"


# A worker carries these out without its lock, because they may wait for another process.
SLOW = frozenset({Do.START, Do.REPLY, Do.FAIL, Do.FREE_SLOTS, Do.RELEASE_LEASES, Do.RELEASE_GIVEN})
